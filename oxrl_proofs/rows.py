"""Proofs of every policy-gradient row of the table, in float64 on a small batch that holds every
awkward case.

`prove(row)` runs them; `oxrl algorithms --check` prints them. A proof raises AssertionError; a row
that is exempt from one says why in the table. The KL to the reference is part of what is compared
with the literal losses; entropy, likelihood and value terms are left out: they have tests of their
own.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oxrl.functional.advantages import ADVANTAGES, AdvantageInputs
from oxrl.functional.centering import CENTERINGS, Outcomes
from oxrl.functional.corrections import CORRECTIONS
from oxrl.functional.gates import LossInputs
from oxrl.functional.kl import KLS, add_kl_to_rewards, kl_k3_ratio
from oxrl.functional.masks import LossAndMetrics, weighted_sum
from oxrl.functional.policy_losses import GATES
from oxrl.functional.ratios import RATIOS, interpolated_anchor
from oxrl.functional.selections import SELECTIONS, above_row_quantile, router_shift
from oxrl.functional.weights import WEIGHTS
from oxrl.tables.cells import BINARY_REWARDS, INTERPOLATED_ANCHOR, find_cell
from oxrl.tables.policy import ROWS, Row
from oxrl_proofs.identities import LIMITS, WORKED
from oxrl_proofs.literal import literal_loss
from oxrl_proofs.literal_batch import Numbers, Response

NAN = float("nan")
TOP = 3
# Share of the run's steps that were taken before.
DONE = 0.3
# Gates that carry gradient to candidates too.
WITH_CANDIDATES = ("simko", "teacher_divergence")
# Numbers that a cell cannot do without, where the row leaves them to the config.
NUMBERS: dict[str, Any] = {
    "gamma": 0.98,
    "gae_lambda": 0.95,
    "length_alpha": 0.3,
    "whiten": True,
    "bootstrap_on_truncation": True,
    "pass_k": 2,
    "weights_length": 8,
    "length_power": 1.0,
    "proximal_coeff": 0.1,
    "explore_quantile": 0.4,
    "cov_low": 0.0,
    "cov_high": 5.0,
    "cov_fraction": 0.2,
    "kl_coeff": 0.07,
}
# Other values of every number that a formula reads: two more settings for the second
# implementation to agree with.
OTHER_NUMBERS: tuple[dict[str, Any], ...] = (
    {
        "clip_low": 0.1,
        "clip_high": 0.35,
        "clip_dual": 1.7,
        "weight_min": 0.6,
        "weight_max": 1.4,
        "sapo_positive": 2.5,
        "sapo_negative": 0.4,
        "gate_sharpness": 3.0,
        "dppo_low": 0.01,
        "dppo_high": 0.03,
        "proximal_coeff": 0.6,
        "drpo_delta": 0.04,
        "spo": True,
        "influence_range": 0.7,
        "influence_half_life": 1.5,
        "influence_ratio_max": 1.2,
        "simko_alpha": 0.3,
        "simko_boost": 1.6,
        "explore_quantile": 0.75,
        "cov_fraction": 0.45,
        "cov_low": -0.2,
        "cov_high": 0.3,
        "kl_cov_coeff": 0.3,
        "gamma": 0.7,
        "gae_lambda": 0.4,
        "turn_gamma": 0.3,
        "turn_lambda": 0.9,
        "length_alpha": 0.9,
        "whiten": False,
        "bootstrap_on_truncation": False,
        "pass_k": 1,
        "maxrl_order": 2,
        "iqr_floor": 0.05,
        "correction_max": 1.3,
        "correction_min": 0.8,
        "correction_k3_max": 1e-3,
        "correction_veto": 0.6,
        "drift_max": 0.02,
        "second_moment_max": 4e-3,
        "kl_coeff": 0.9,
        "length_power": -2.0,
        "weights_length": 3,
        "teacher_coeff": 0.6,
        "teacher_coeff_end": 1.4,
        "teacher_gamma": 0.7,
        "teacher_mean": True,
        "prefix_coeff": 2.0,
        "divergence_alpha": 0.3,
    },
    {
        "clip_low": 3e-4,
        "clip_high": 1e-4,
        "clip_dual": 1.01,
        "weight_min": 0.99,
        "weight_max": 1.01,
        "dppo_low": 0.3,
        "dppo_high": 0.2,
        "proximal_coeff": 0.0,
        "drpo_delta": 1.0,
        "influence_range": 0.0,
        "explore_quantile": 0.0,
        "cov_fraction": 1e-3,
        "cov_low": 0.05,
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "turn_gamma": 0.0,
        "whiten": True,
        "maxrl_order": 1,
        "iqr_floor": 3.0,
        "correction_level": "geometric",
        "correction_max": 1.02,
        "correction_min": 0.97,
        "correction_veto": 0.98,
        "drift_max": -0.01,
        "second_moment_max": 0.3,
        "kl_coeff": 0.0,
        "length_power": 0.0,
        "teacher_coeff": 0.0,
        "teacher_coeff_end": 0.2,
        "teacher_gamma": 0.0,
        "prefix_coeff": 0.0,
        "divergence_alpha": 0.0,
    },
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A raw batch. Per-token tensors [B, T] hold NaN where `mask` is False; `routers` is [B, T, 2,
    K].
    """

    mask: Tensor
    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    values: Tensor
    teacher: Tensor
    entropy: Tensor
    noise: Tensor
    versions: Tensor
    token_rewards: Tensor
    rewards: Tensor
    first_part: Tensor
    second_part: Tensor
    greedy: Tensor
    group_ids: Tensor
    bootstrap: Tensor
    truncated: Tensor
    top: Tensor
    old_top: Tensor
    teacher_top: Tensor
    routers: Tensor
    old_routers: Tensor
    turns: Tensor
    next_turn: Tensor
    squares: Tensor
    outcomes: Tensor
    old_outcomes: Tensor
    sampler_outcomes: Tensor


LENGTHS = (1, 5, 3, 0, 6, 4, 2, 6, 5, 3)
GROUP_IDS = (4, 4, 4, 7, 7, 7, 7, 2, 2, 9)
SUCCESSES = (1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0)
# A second part of the reward, which one response does not have; the first is the reward itself.
SECOND_PART = (0.5, 0.5, 1.0, NAN, 0.0, 1.0, 1.0, 0.2, 0.9, 1.0)
PART_WEIGHTS = (1.0, -0.4)
GRADES = (0.3, -1.0, 0.3, 2.0, 0.5, -0.25, 2.0, 0.7, 0.7, 1.5)


def example(
    *,
    spread: tuple[float, ...] = (1e-4, 0.02, 0.5),
    rewards: tuple[float, ...] = SUCCESSES,
    likely: float = 0.5,
    seed: int = 11,
) -> Example:
    """Ten rows in four groups: one token, no token, a hole left by a tool, equal rewards, a group
    of one.

    Args:
        spread: standard deviation of log r and log rho, cycled over the rows, so that narrow and
            wide clips act.
        rewards: of the rows.
        likely: the largest logprob of the sampler is minus this.
        seed: of everything random.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    size = (len(lengths), 8)
    position = torch.arange(size[1])[None] - 2
    mask = (position >= 0) & (position < lengths[:, None])
    mask[4, 4] = False
    scores = torch.tensor(rewards, dtype=torch.float64)
    cycled = [spread[i % len(spread)] for i in range(size[0])]
    scale = torch.tensor(cycled, dtype=torch.float64)[:, None]

    def noise(*shape: int) -> Tensor:
        return torch.randn(*size, *shape, generator=generator, dtype=torch.float64)

    def hole(x: Tensor) -> Tensor:
        return torch.where(mask.reshape(*size, *(1,) * (x.ndim - 2)), x, NAN)

    def possible(x: Tensor) -> Tensor:
        """As a logprob: below 0."""
        return hole(x.clamp(max=-0.01))

    rollout = -torch.rand(size, generator=generator, dtype=torch.float64) - likely
    old = rollout + scale * noise()
    logprobs = rollout + scale * noise()
    p = old.clamp(max=-0.01).exp()
    old_top = (noise(TOP + 2).log_softmax(-1))[..., :TOP]
    routers = noise(2, TOP) - 3
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    later = torch.Generator().manual_seed(seed + 1)
    teacher_top = torch.randn(*size, TOP + 2, generator=later, dtype=torch.float64).log_softmax(-1)
    # Of every second position it told one candidate fewer.
    teacher_top[:, ::2, TOP - 1] = NAN
    # Of two tokens and of all others, which are nothing at every second position.
    later = torch.Generator().manual_seed(seed + 2)
    sampler_outcomes = torch.randn(*size, TOP, generator=later, dtype=torch.float64).log_softmax(-1)

    def moved(x: Tensor) -> Tensor:
        """Of another policy, log-probabilities too."""
        further = scale[..., None] * torch.randn(*x.shape, generator=later, dtype=torch.float64)
        return (x + further).clamp(max=-0.01)

    old_outcomes = moved(sampler_outcomes)
    outcomes = moved(old_outcomes)
    sampler_outcomes[:, ::2, TOP - 1] = -torch.inf
    return Example(
        mask=mask,
        rollout=hole(rollout),
        old=possible(old),
        logprobs=possible(logprobs),
        ref=possible(logprobs + 0.4 * noise()),
        values=hole(noise()),
        teacher=hole(old + noise()),
        entropy=hole(noise().exp()),
        noise=hole(noise()),
        versions=torch.randint(0, 5, size, generator=generator),
        # A quarter of it comes early, so that there is something to discount.
        token_rewards=torch.where(last, 0.75 * scores[:, None], 0.0)
        + torch.where(mask & (mask.cumsum(1) == 1), 0.25 * scores[:, None], 0.0),
        rewards=scores,
        first_part=scores,
        second_part=torch.tensor(SECOND_PART, dtype=torch.float64),
        greedy=scores.roll(1),
        group_ids=torch.tensor(GROUP_IDS),
        bootstrap=noise()[:, 0],
        truncated=torch.arange(size[0]) % 2 == 0,
        top=hole(old_top + 0.1 * scale[..., None] * noise(TOP)),
        old_top=hole(old_top),
        teacher_top=hole(teacher_top[..., :TOP]),
        routers=hole(routers + 0.1 * noise(2, TOP)),
        old_routers=hole(routers),
        # Two tokens each; a hole is in the turn of what stands before it.
        turns=torch.where(mask, position.clamp(min=0) // 2, -1),
        next_turn=torch.arange(size[0]) % 4 == 0,
        # Of the others some share is with one token.
        squares=hole(p**2 + (1 - p) ** 2 * rollout.exp()),
        outcomes=hole(outcomes),
        old_outcomes=hole(old_outcomes),
        sampler_outcomes=hole(sampler_outcomes),
    )


def examples(row: Row) -> dict[str, Example]:
    """What a second implementation is compared on."""
    ordinary = example()
    far = example(spread=(0.3, 1.5, 4.0), likely=9.0, seed=12)
    # Half of the tokens have ratio 1 to the last bit, to the old policy and to the sampler.
    tied = example(seed=13)
    even = torch.arange(tied.mask.shape[1]) % 2 == 0
    old = torch.where(even, tied.rollout, tied.old)
    tied = dataclasses.replace(tied, old=old, logprobs=torch.where(even, old, tied.logprobs))
    nothing = example(rewards=(1.0,) * len(LENGTHS), seed=14)
    found = {
        "ordinary ratios": ordinary,
        "ratios far out": far,
        "ties": tied,
        "equal rewards": nothing,
    }
    if BINARY_REWARDS not in row.parts:
        found["graded rewards"] = example(rewards=GRADES, seed=15)
    return found


def on_policy(raw: Example) -> Example:
    """The same batch when sampler, old policy and current policy are one."""
    return dataclasses.replace(
        raw,
        logprobs=raw.rollout,
        old=raw.rollout,
        top=raw.old_top,
        routers=raw.old_routers,
        outcomes=raw.sampler_outcomes,
        old_outcomes=raw.sampler_outcomes,
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one update reads, prepared over the whole batch as a recipe does; every tensor has B
    rows.
    """

    logprobs: Tensor
    reference: Tensor  # under the ratio: old or rollout logprobs
    rollout: Tensor
    ref: Tensor  # of the KL
    mask: Tensor
    advantages: Tensor
    loss_weights: Tensor
    correction: Tensor | None
    signals: Mapping[str, Tensor]
    outcomes: Outcomes

    def select(self, rows: Tensor) -> Step:
        def pick(x: Any) -> Any:
            if isinstance(x, Mapping):
                return {name: tensor[rows] for name, tensor in x.items()}
            if isinstance(x, Outcomes):
                return Outcomes(*(tensor[rows] for tensor in x))
            return None if x is None else x[rows]

        return Step(
            **{field.name: pick(getattr(self, field.name)) for field in dataclasses.fields(self)}
        )


def all_numbers(name: str, other: Numbers) -> dict[str, Any]:
    """The numbers that a row of the table reads: of `other`, else of `NUMBERS`, else its own."""
    row = ROWS[name]
    values = {**row.defaults, **NUMBERS, **other}
    read = [number.name for part in row.parts for number in part.numbers]
    return {number: values[number] for number in read if number in values}


def cell_numbers(row: Row, kind: str, other: Numbers | None = None) -> dict[str, Any]:
    """The numbers of the row's cell of `kind`."""
    values = {**row.defaults, **NUMBERS, **(other or {})}
    name = row.gate if kind == "selection" else getattr(row, kind)
    return {number.name: values[number.name] for number in find_cell(kind, name).numbers}


def rewarded(row: Row, raw: Example, other: Numbers | None) -> Example:
    """The example with the KL taken off its rewards, where the row does so."""
    if not row.kl.startswith("reward_"):
        return raw
    coeff = cell_numbers(row, "kl", other)["kl_coeff"]
    rewards, token_rewards = add_kl_to_rewards(
        raw.rewards, raw.token_rewards, raw.old, raw.ref, raw.mask, kl_coeff=coeff
    )
    return dataclasses.replace(raw, rewards=rewards, token_rewards=token_rewards)


def advantages_of(row: Row, raw: Example, other: Numbers | None = None) -> Tensor:
    """The advantage of every token, [B, T]."""
    given = rewarded(row, raw, other)
    advantages, _ = ADVANTAGES[row.advantage](
        AdvantageInputs(
            rewards=given.rewards,
            token_rewards=given.token_rewards,
            response_mask=raw.mask,
            group_ids=raw.group_ids,
            values=raw.values,
            bootstrap=raw.bootstrap,
            truncated=raw.truncated,
            greedy_rewards=raw.greedy,
            part_rewards=torch.stack([raw.first_part, raw.second_part], dim=1),
            part_weights=torch.tensor(PART_WEIGHTS, dtype=torch.float64),
            old_logprobs=raw.old,
            policy_logprobs=raw.old,
            sum_p_squared=raw.squares,
            teacher_logprobs=raw.teacher,
            turns=raw.turns,
            next_turn=raw.next_turn,
            done=DONE,
        ),
        **cell_numbers(row, "advantage", other),
    )
    return advantages


def prepare(row: Row, raw: Example, other: Numbers | None = None) -> Step:
    """Advantages, loss weights, correction and whatever else the row's gate reads."""
    advantages = advantages_of(row, raw, other)
    reference = raw.rollout if row.denominator == "rollout" else raw.old
    correction = None
    old = raw.old
    if INTERPOLATED_ANCHOR in row.features:
        old = interpolated_anchor(raw.logprobs, raw.rollout, ages(raw), raw.mask)
        reference = old
    if row.correction != "none":
        numbers = cell_numbers(row, "correction", other)
        judged = old
        if row.correction == "drop_drifted_failures":
            numbers["advantages"] = advantages
            judged = raw.logprobs
        correction = CORRECTIONS[row.correction](judged, raw.rollout, raw.mask, **numbers)
    weights = cell_numbers(row, "weights", other)
    return Step(
        logprobs=raw.logprobs,
        reference=reference,
        rollout=raw.rollout,
        ref=raw.ref,
        mask=raw.mask,
        advantages=advantages,
        loss_weights=WEIGHTS[row.weights](raw.mask, raw.group_ids, **weights).double(),
        correction=correction,
        signals=signals(row, raw, advantages, other),
        outcomes=Outcomes(
            raw.outcomes, raw.old_outcomes, raw.sampler_outcomes, raw.versions % 2 == 0
        ),
    )


def ages(raw: Example) -> Tensor:
    """Rollout batches since a token was sampled, from none to five."""
    return 4 - raw.versions


def signals(row: Row, raw: Example, advantages: Tensor, other: Numbers | None) -> dict[str, Tensor]:
    """The further tensors of the row's gate."""
    numbers = cell_numbers(row, "selection", other)
    flags = raw.versions % 2 == 0
    tops = {"top_logprobs": raw.top, "old_top_logprobs": raw.old_top}
    if row.gate == "simko":
        explore = above_row_quantile(raw.entropy, raw.mask, quantile=numbers["explore_quantile"])
        return {**tops, "explore": explore, "sampled_is_top": flags}
    if row.gate in ("dppo_topk_tv", "dppo_topk_kl"):
        return {**tops, "sampled_in_top": flags}
    if row.gate == "teacher_divergence":
        return {
            "top_logprobs": raw.top,
            "teacher_top_logprobs": raw.teacher_top,
            "teacher_logprobs": raw.teacher,
            "sampled_in_top": flags,
        }
    if row.gate == "rspo":
        return {"router_shift": router_shift(raw.routers, raw.old_routers, raw.mask)}
    if row.gate in ("clip_cov", "kl_cov"):
        known = {
            "mask": raw.mask,
            "advantages": advantages,
            "logprobs": raw.old,
            "noise": raw.noise,
        }
        return SELECTIONS[row.gate](known, **numbers)
    return {}


def leaves_of(row: Row, step: Step) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The tensors that carry gradient, logprobs first, and all further tensors of the gate."""
    logprobs, further = step.logprobs.clone().requires_grad_(), dict(step.signals)
    if row.centering != "none":
        further["outcomes"] = step.outcomes.logprobs.clone().requires_grad_()
        return [logprobs, further["outcomes"]], further
    if row.gate not in WITH_CANDIDATES:
        return [logprobs], further
    further["top_logprobs"] = further["top_logprobs"].clone().requires_grad_()
    return [logprobs, further["top_logprobs"]], further


def gradients_of(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Loss, and its gradients by the leaves, flat: [B, T] or [B, T + T * K]."""
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)


def loss_and_gradients(row: Row, step: Step, other: Numbers | None = None) -> tuple[Tensor, Tensor]:
    """The policy's loss as a recipe composes it, without its KL."""
    leaves, further = leaves_of(row, step)
    return gradients_of(policy_loss(row, step, leaves[0], further, other), leaves)


def policy_loss(
    row: Row, step: Step, logprobs: Tensor, further: Mapping[str, Tensor], other: Numbers | None
) -> Tensor:
    """The row's gate on its ratio; centered, where the row does so."""
    if row.centering != "none":
        return centered_loss(row, step, logprobs, further["outcomes"], other)
    loss, _ = GATES[row.gate](
        logprobs,
        RATIOS[row.ratio](logprobs, step.reference, step.mask),
        step.advantages,
        step.mask,
        step.loss_weights,
        correction=step.correction,
        **further,
        **cell_numbers(row, "gate", other),
    )
    return loss


def centered_loss(
    row: Row, step: Step, logprobs: Tensor, outcomes: Tensor, other: Numbers | None
) -> Tensor:
    """The gate of a row without correction, minus its expectation under the sampler."""
    numbers = cell_numbers(row, "gate", other)

    def loss_of(tokens: LossInputs) -> LossAndMetrics:
        anchor = RATIOS[row.ratio](tokens.logprobs, tokens.old, tokens.mask)
        return GATES[row.gate](
            tokens.logprobs, anchor, tokens.advantages, tokens.mask, tokens.loss_weights, **numbers
        )

    tokens = LossInputs(
        logprobs, step.reference, step.rollout, step.advantages, step.mask, step.loss_weights
    )
    known = step.outcomes._replace(logprobs=outcomes)
    loss, _ = CENTERINGS[row.centering](loss_of, tokens, known, **cell_numbers(row, "centering"))
    return loss


def whole_loss_and_gradients(row: Row, step: Step, other: Numbers) -> tuple[Tensor, Tensor]:
    """The policy's loss and its KL to the reference."""
    leaves, further = leaves_of(row, step)
    loss = policy_loss(row, step, leaves[0], further, other)
    if row.kl.startswith("loss_"):
        estimate = KLS[row.kl]
        if estimate is kl_k3_ratio:
            kl = kl_k3_ratio(leaves[0], step.ref, step.mask, step.rollout)
        else:
            kl = estimate(leaves[0], step.ref, step.mask)
        coeff = cell_numbers(row, "kl", other)["kl_coeff"]
        loss = loss + coeff * weighted_sum(kl, step.mask, step.loss_weights)
    return gradients_of(loss, leaves)


def literal_loss_and_gradients(row: Row, raw: Example, other: Numbers) -> tuple[Tensor, Tensor]:
    """The loss as the row's source writes it, from the same raw batch, row by row."""
    logprobs = raw.logprobs.clone().requires_grad_()
    top = raw.top.clone().requires_grad_()
    outcomes = raw.outcomes.clone().requires_grad_()
    known = dataclasses.replace(raw, outcomes=outcomes)
    responses = [response_of(known, row, logprobs, top) for row in range(len(raw.mask))]
    loss = literal_loss(row.name, responses, all_numbers(row.name, other))
    leaves = [logprobs, top] if row.gate in WITH_CANDIDATES else [logprobs]
    if row.centering != "none":
        leaves = [logprobs, outcomes]
    return gradients_of(loss, leaves)


def response_of(raw: Example, row: int, logprobs: Tensor, top: Tensor) -> Response:
    """A row of the example as its trained tokens; `logprobs` and `top` are the leaves."""
    kept = raw.mask[row].nonzero().flatten()
    return Response(
        prompt=int(raw.group_ids[row]),
        reward=float(raw.rewards[row]),
        parts=(float(raw.first_part[row]), float(raw.second_part[row])),
        part_weights=PART_WEIGHTS,
        greedy=float(raw.greedy[row]),
        bootstrap=float(raw.bootstrap[row]),
        cut=bool(raw.truncated[row]),
        next_turn=bool(raw.next_turn[row]),
        turns=raw.turns[row, kept].tolist(),
        places=kept.tolist(),
        token_rewards=raw.token_rewards[row, kept].tolist(),
        logprobs=logprobs[row, kept],
        old=raw.old[row, kept],
        squares=raw.squares[row, kept].tolist(),
        sampler=raw.rollout[row, kept],
        reference=raw.ref[row, kept],
        teacher=raw.teacher[row, kept].tolist(),
        done=DONE,
        values=raw.values[row, kept].tolist(),
        entropy=raw.entropy[row, kept].tolist(),
        noise=raw.noise[row, kept].tolist(),
        ages=ages(raw)[row, kept].tolist(),
        flags=(raw.versions[row, kept] % 2 == 0).tolist(),
        top=top[row, kept],
        old_top=raw.old_top[row, kept],
        teacher_top=raw.teacher_top[row, kept],
        routers=raw.routers[row, kept],
        old_routers=raw.old_routers[row, kept],
        outcomes=raw.outcomes[row, kept],
        old_outcomes=raw.old_outcomes[row, kept],
        sampler_outcomes=raw.sampler_outcomes[row, kept],
    )


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    """Relative to the largest expected entry; NaN is never close."""
    error = float((found - expected).abs().max()) if found.numel() else 0.0
    scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-30)
    assert error <= tolerance * scale, (
        f"{what}: off by {error:.3g}, {error / scale:.3g} of the largest entry"
    )


def close_each(found: Tensor, expected: Tensor, what: str) -> None:
    """Every entry by its own size, or by that of the median one: a ratio far out must not hide the
    ordinary ones, and an entry may be a small difference of two ordinary numbers.

    Loss weights are float32, and the sources have no epsilon beside a standard deviation, hence the
    tolerance.
    """
    sizes = expected.abs()
    ordinary = float(sizes[sizes > 0].median()) if bool(sizes.any()) else 1e-9
    error = (found - expected).abs()
    far = ~(error <= 5e-7 * (sizes + ordinary))
    worst = float(error.max())
    assert not far.any(), f"{what}: {int(far.sum())} entries differ, by up to {worst:.3g}"


def effective_weight(row: Row) -> None:
    """Loss and gradient are those of the source's formula, on several batches with several values
    of every number.
    """
    for title, raw in examples(row).items():
        for index, other in enumerate(({}, *OTHER_NUMBERS)):
            what = f"{title}, setting {index}"
            loss, gradients = whole_loss_and_gradients(row, prepare(row, raw, other), other)
            expected, reference = literal_loss_and_gradients(row, raw, other)
            close_each(gradients, reference, f"gradient against the formula ({what})")
            size = max(float(expected.abs()), float(reference.abs().sum()))
            assert abs(float(loss - expected)) <= 1e-6 * max(size, 1e-12), (
                f"value against the formula ({what}): {float(loss)} for {float(expected)}"
            )


def on_policy_gradient(row: Row) -> None:
    """With one policy everywhere, the gradient is the plain policy gradient -A * loss weight."""
    step = prepare(row, on_policy(example()))
    plain = torch.where(step.mask, -step.advantages * step.loss_weights, 0.0)
    close(loss_and_gradients(row, step)[1][:, : plain.shape[1]], plain, "on-policy gradient")


def micro_batches(row: Row) -> None:
    """Splitting the step changes neither loss nor gradient."""
    step = prepare(row, example())
    loss, gradients = loss_and_gradients(row, step)
    for size in (1, 3, 4):
        parts = [
            loss_and_gradients(row, step.select(rows))
            for rows in torch.arange(len(step.mask)).split(size)
        ]
        close(
            torch.cat([part[1] for part in parts]),
            gradients,
            f"gradient in micro-batches of {size}",
        )
        close(
            torch.stack([part[0] for part in parts]).sum(), loss, f"loss in micro-batches of {size}"
        )


def padding(row: Row) -> None:
    """Three more columns of padding, NaN in every float, change nothing."""
    raw = example()
    columns = raw.mask.shape[1]

    def widen(x: Tensor) -> Tensor:
        if x.ndim < 2:
            return x
        fill = NAN if x.is_floating_point() else 0
        return torch.cat([x, torch.full((x.shape[0], 3, *x.shape[2:]), fill, dtype=x.dtype)], dim=1)

    wide = Example(
        **{field.name: widen(getattr(raw, field.name)) for field in dataclasses.fields(raw)}
    )
    found, expected = (loss_and_gradients(row, prepare(row, batch)) for batch in (wide, raw))
    close(found[0], expected[0], "loss with more padding")
    close(found[1][:, :columns], expected[1][:, :columns], "gradient with more padding")
    assert not found[1][:, columns : columns + 3].any(), "padding has a gradient"


def row_order(row: Row) -> None:
    """Shuffling the rows before anything is computed shuffles the gradient."""
    raw, order = example(), torch.tensor([9, 2, 5, 0, 7, 1, 8, 3, 6, 4])
    mixed = Example(
        **{field.name: getattr(raw, field.name)[order] for field in dataclasses.fields(raw)}
    )
    found, expected = (loss_and_gradients(row, prepare(row, batch)) for batch in (mixed, raw))
    close(found[1], expected[1][order], "gradient of shuffled rows")


def zero_advantage(row: Row) -> None:
    """Advantages of 0 give a gradient of exactly 0."""
    step = prepare(row, example())
    still = dataclasses.replace(step, advantages=torch.zeros_like(step.advantages))
    assert not loss_and_gradients(row, still)[1].any(), "zero advantages have a gradient"


def finite(row: Row) -> None:
    """Ratios beyond e^20 either way, a batch without a trained token, equal rewards: all finite,
    and 0 where due.
    """
    raw = example()
    for shift in (60.0, -60.0):
        far = dataclasses.replace(raw, logprobs=raw.logprobs + shift, old=raw.old - shift)
        loss, gradients = loss_and_gradients(row, prepare(row, far))
        assert loss.isfinite() and gradients.isfinite().all(), (
            f"not finite when log r is shifted by {2 * shift}"
        )
    nothing = dataclasses.replace(raw, mask=torch.zeros_like(raw.mask))
    loss, gradients = loss_and_gradients(row, prepare(row, nothing))
    assert loss == 0 and not gradients.any(), "a batch without a trained token has a gradient"
    same = torch.ones_like(raw.rewards)
    step = prepare(row, dataclasses.replace(raw, rewards=same), {"kl_coeff": 0.0})
    assert step.advantages.isfinite().all(), "equal rewards give advantages that are not finite"
    if row.advantage.startswith(
        ("group_center", "iqr", "leave_one_out", "mean_normalize", "pass_at_k", "top_gap")
    ):
        assert not step.advantages.any(), "equal rewards give advantages"


ROW_PROOFS: dict[str, Callable[[Row], None]] = {
    "effective_weight": effective_weight,
    "on_policy": on_policy_gradient,
    "micro_batches": micro_batches,
    "padding": padding,
    "row_order": row_order,
    "zero_advantage": zero_advantage,
    "finite": finite,
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was proved of a row, what failed and why, what it is exempt from and why."""

    passed: tuple[str, ...]
    failed: Mapping[str, str]
    exempt: Mapping[str, str]


def proofs_of(row: Row) -> dict[str, Callable[[], None]]:
    """Every proof of `row` that runs in one process: of the row, and limits and worked numbers of
    its cells.
    """
    proofs: dict[str, Callable[[], None]] = {
        name: (lambda proof=proof: proof(row))
        for name, proof in ROW_PROOFS.items()
        if name not in row.exempt
    }
    for cell in (*row.cells, ("ratio", row.ratio)):
        for title, checks in (("limit", LIMITS), ("worked numbers", WORKED)):
            if cell in checks:
                proofs[f"{title} of {cell[1]}"] = checks[cell]
    return proofs


def prove(row: Row) -> Report:
    """Run the proofs of one row that need a single process."""
    passed: list[str] = []
    failed: dict[str, str] = {}
    for name, proof in proofs_of(row).items():
        try:
            proof()
        except AssertionError as error:
            failed[name] = str(error)
        else:
            passed.append(name)
    return Report(passed=tuple(passed), failed=failed, exempt=row.exempt)


def check_all() -> dict[str, Report]:
    """Reports of every policy-gradient row, two data-parallel ranks included."""
    errors = two_rank_errors()
    reports = {name: prove(row) for name, row in ROWS.items() if row.recipe == "rl"}
    for name, report in reports.items():
        if errors[name] <= 1e-10:
            reports[name] = dataclasses.replace(report, passed=(*report.passed, "two_ranks"))
        else:
            failed = {**report.failed, "two_ranks": f"relative error {errors[name]:.3g}"}
            reports[name] = dataclasses.replace(report, failed=failed)
    return reports


def _parameter_gradient(row: Row, rows: Tensor) -> Tensor:
    """Gradient by the four parameters of a linear model of the logprobs, of the loss of `rows`."""
    step = prepare(row, example())
    _, gradients = loss_and_gradients(row, step.select(rows))
    features = torch.randn(
        *step.mask.shape, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    return torch.einsum("bt,btk->k", gradients[:, : step.mask.shape[1]], features[rows])


def _rank(rank: int, store: str, results: Any) -> None:
    """One of two data-parallel ranks: unequal shares of the rows, summed by all-reduce."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}/store", rank=rank, world_size=2
    )
    shares = [torch.arange(0, 3), torch.arange(3, 10)]
    errors: dict[str, float] = {}
    for name, row in ROWS.items():
        if row.recipe != "rl":
            continue
        mine = _parameter_gradient(row, shares[rank])
        torch.distributed.all_reduce(mine)
        whole = _parameter_gradient(row, torch.arange(10))
        errors[name] = float((mine - whole).abs().max() / whole.abs().max().clamp(min=1e-30))
    torch.distributed.destroy_process_group()
    if rank == 0:
        results.put(errors)


def two_rank_errors() -> dict[str, float]:
    """Per row, the relative error of a gradient summed over two gloo processes against that of
    one.
    """
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as store:
        ranks = [context.Process(target=_rank, args=(rank, store, results)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=120)
        if any(process.exitcode != 0 for process in ranks):
            for process in ranks:
                process.kill()
            raise AssertionError(
                f"a rank failed: exit codes {[process.exitcode for process in ranks]}"
            )
        return results.get()
