"""Proofs of every policy-gradient row of the table, in float64 on a small batch that holds every
awkward case.

`prove(row)` runs them; `oxrl algorithms --check` prints them. A proof raises AssertionError; a row
that is exempt from one says why in the table. Auxiliary terms (KL, entropy, likelihood, value) are
left out: they have tests of their own.
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
from oxrl.functional.corrections import CORRECTIONS
from oxrl.functional.policy_losses import GATES
from oxrl.functional.ratios import RATIOS, interpolated_anchor
from oxrl.functional.selections import (
    above_row_quantile,
    covariance,
    router_shift,
    select_clip_cov,
    select_kl_cov,
)
from oxrl.functional.weights import WEIGHTS
from oxrl.tables.cells import INTERPOLATED_ANCHOR, find_cell
from oxrl.tables.policy import ROWS, Row
from oxrl_proofs.identities import LIMITS, WORKED
from oxrl_proofs.literal import LITERAL

NAN = float("nan")
TOP = 3
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
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """A raw batch. Per-token tensors [B, T] hold NaN where `mask` is False; `routers` is [B, T, 2,
    K].
    """

    mask: Tensor
    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    values: Tensor
    teacher: Tensor
    entropy: Tensor
    noise: Tensor
    versions: Tensor
    token_rewards: Tensor
    rewards: Tensor
    greedy: Tensor
    group_ids: Tensor
    bootstrap: Tensor
    truncated: Tensor
    top: Tensor
    old_top: Tensor
    routers: Tensor
    old_routers: Tensor


def example(*, spread: tuple[float, ...] = (1e-4, 0.02, 0.5)) -> Example:
    """Ten rows in four groups: one token, no token, a hole left by a tool, equal rewards, a group
    of one.

    `spread` is the standard deviation of log r and log rho, cycled over the rows, so that narrow
    and wide clips act.
    """
    generator = torch.Generator().manual_seed(11)
    lengths = torch.tensor([1, 5, 3, 0, 6, 4, 2, 6, 5, 3])
    size = (len(lengths), 8)
    position = torch.arange(size[1])[None] - 2
    mask = (position >= 0) & (position < lengths[:, None])
    mask[4, 4] = False
    rewards = torch.tensor([1, 0, 0, 0, 1, 1, 0, 1, 1, 1], dtype=torch.float64)
    scale = torch.tensor([spread[i % len(spread)] for i in range(size[0])], dtype=torch.float64)[
        :, None
    ]

    def noise(*shape: int) -> Tensor:
        return torch.randn(*size, *shape, generator=generator, dtype=torch.float64)

    def hole(x: Tensor) -> Tensor:
        return torch.where(mask.reshape(*size, *(1,) * (x.ndim - 2)), x, NAN)

    rollout = -torch.rand(size, generator=generator, dtype=torch.float64) - 0.5
    old_top = (noise(TOP + 2).log_softmax(-1))[..., :TOP]
    routers = noise(2, TOP) - 3
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return Example(
        mask=mask,
        rollout=hole(rollout),
        old=hole(rollout + scale * noise()),
        logprobs=hole(rollout + scale * noise()),
        values=hole(noise()),
        teacher=hole(rollout + noise()),
        entropy=hole(noise().exp()),
        noise=hole(noise()),
        versions=torch.randint(0, 5, size, generator=generator),
        token_rewards=torch.where(last, rewards[:, None], 0.0),
        rewards=rewards,
        greedy=rewards.roll(1),
        group_ids=torch.tensor([4, 4, 4, 7, 7, 7, 7, 2, 2, 9]),
        bootstrap=noise()[:, 0],
        truncated=torch.arange(size[0]) % 2 == 0,
        top=hole(old_top + 0.1 * scale[..., None] * noise(TOP)),
        old_top=hole(old_top),
        routers=hole(routers + 0.1 * noise(2, TOP)),
        old_routers=hole(routers),
    )


def on_policy(raw: Example) -> Example:
    """The same batch when sampler, old policy and current policy are one."""
    return dataclasses.replace(
        raw, logprobs=raw.rollout, old=raw.rollout, top=raw.old_top, routers=raw.old_routers
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one update reads, prepared over the whole batch as a recipe does; every tensor has B
    rows.
    """

    logprobs: Tensor
    reference: Tensor  # under the ratio: old or rollout logprobs
    mask: Tensor
    advantages: Tensor
    loss_weights: Tensor
    correction: Tensor | None
    signals: Mapping[str, Tensor]

    def select(self, rows: Tensor) -> Step:
        def pick(x: Any) -> Any:
            if isinstance(x, Mapping):
                return {name: tensor[rows] for name, tensor in x.items()}
            return None if x is None else x[rows]

        return Step(
            **{field.name: pick(getattr(self, field.name)) for field in dataclasses.fields(self)}
        )


def cell_numbers(row: Row, kind: str) -> dict[str, Any]:
    """The numbers of the row's cell of `kind`: those of `NUMBERS`, else the row's."""
    values = {**row.defaults, **NUMBERS}
    cell = find_cell(kind, getattr(row, kind))
    return {number.name: values[number.name] for number in cell.numbers}


def prepare(row: Row, raw: Example) -> Step:
    """Advantages, loss weights, correction and whatever else the row's gate reads."""
    advantages, _ = ADVANTAGES[row.advantage](
        AdvantageInputs(
            rewards=raw.rewards,
            token_rewards=raw.token_rewards,
            response_mask=raw.mask,
            group_ids=raw.group_ids,
            values=raw.values,
            bootstrap=raw.bootstrap,
            truncated=raw.truncated,
            greedy_rewards=raw.greedy,
            old_logprobs=raw.old,
            teacher_logprobs=raw.teacher,
        ),
        **cell_numbers(row, "advantage"),
    )
    reference = raw.rollout if row.denominator == "rollout" else raw.old
    correction = None
    old = raw.old
    if INTERPOLATED_ANCHOR in row.features:
        old = interpolated_anchor(raw.logprobs, raw.rollout, 5 - raw.versions, raw.mask)
        reference = old
    if row.correction != "none":
        numbers = cell_numbers(row, "correction")
        judged = old
        if row.correction == "drop_drifted_failures":
            numbers["advantages"] = advantages
            judged = raw.logprobs
        correction = CORRECTIONS[row.correction](judged, raw.rollout, raw.mask, **numbers)
    return Step(
        logprobs=raw.logprobs,
        reference=reference,
        mask=raw.mask,
        advantages=advantages,
        loss_weights=WEIGHTS[row.weights](
            raw.mask, raw.group_ids, **cell_numbers(row, "weights")
        ).double(),
        correction=correction,
        signals=signals(row, raw, advantages),
    )


def signals(row: Row, raw: Example, advantages: Tensor) -> dict[str, Tensor]:
    """The further tensors of the row's gate."""
    covariances = covariance(raw.old, advantages, raw.mask)
    flags = raw.versions % 2 == 0
    by_gate: dict[str, Callable[[], dict[str, Tensor]]] = {
        "simko": lambda: {
            "top_logprobs": raw.top,
            "old_top_logprobs": raw.old_top,
            "explore": above_row_quantile(raw.entropy, raw.mask, quantile=0.4),
            "sampled_is_top": flags,
        },
        "dppo_topk_tv": lambda: {
            "top_logprobs": raw.top,
            "old_top_logprobs": raw.old_top,
            "sampled_in_top": flags,
        },
        "clip_cov": lambda: {
            "selected": select_clip_cov(
                covariances, raw.noise, raw.mask, low=0.0, high=5.0, fraction=0.2
            )
        },
        "kl_cov": lambda: {"selected": select_kl_cov(covariances, raw.mask, fraction=0.2)},
        "rspo": lambda: {"router_shift": router_shift(raw.routers, raw.old_routers, raw.mask)},
    }
    return by_gate.get({"dppo_topk_kl": "dppo_topk_tv"}.get(row.gate, row.gate), dict)()


def leaves_of(row: Row, step: Step) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The tensors that carry gradient, logprobs first, and all further tensors of the gate."""
    logprobs, further = step.logprobs.clone().requires_grad_(), dict(step.signals)
    if row.gate != "simko":
        return [logprobs], further
    further["top_logprobs"] = further["top_logprobs"].clone().requires_grad_()
    return [logprobs, further["top_logprobs"]], further


def gradients_of(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Loss, and its gradients by the leaves, flat: [B, T] or [B, T + T * K]."""
    gradients = torch.autograd.grad(loss, leaves)
    return loss.detach(), torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)


def loss_and_gradients(row: Row, step: Step) -> tuple[Tensor, Tensor]:
    """The loss as a recipe composes it."""
    leaves, further = leaves_of(row, step)
    loss, _ = GATES[row.gate](
        leaves[0],
        RATIOS[row.ratio](leaves[0], step.reference, step.mask),
        step.advantages,
        step.mask,
        step.loss_weights,
        correction=step.correction,
        **further,
        **cell_numbers(row, "gate"),
    )
    return gradients_of(loss, leaves)


def literal_loss_and_gradients(row: Row, step: Step) -> tuple[Tensor, Tensor]:
    """The loss as the paper writes it: row by row, no padding, row ratios attached but for
    GSPO-token.
    """
    leaves, further = leaves_of(row, step)
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(len(step.mask)):
        kept = step.mask[b].nonzero().flatten()
        if not len(kept):
            continue
        logprobs = leaves[0][b, kept]
        x = logprobs - step.reference[b, kept]
        if row.ratio == "geometric":
            x = x.mean().expand(len(kept))
            x = x if row.shared_weight else x.detach() + logprobs - logprobs.detach()
        elif row.ratio == "sequence":
            x = x.sum().expand(len(kept))
        scale = step.loss_weights[b, kept]
        scale = scale if step.correction is None else scale * step.correction[b, kept]
        signals = {name: tensor[b, kept] for name, tensor in further.items()}
        surrogate = LITERAL[row.gate](
            x, logprobs, step.advantages[b, kept], cell_numbers(row, "gate"), signals
        )
        loss = loss - (scale * surrogate).sum()
    return gradients_of(loss, leaves)


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    """Relative to the largest expected entry; NaN is never close."""
    error = float((found - expected).abs().max()) if found.numel() else 0.0
    scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-30)
    assert error <= tolerance * scale, (
        f"{what}: off by {error:.3g}, {error / scale:.3g} of the largest entry"
    )


def effective_weight(row: Row) -> None:
    """The gradient is that of the paper's formula, differentiated by autograd: -correction * w * A
    * loss weight.
    """
    step = prepare(row, example())
    loss, gradients = loss_and_gradients(row, step)
    expected, reference = literal_loss_and_gradients(row, step)
    close(gradients, reference, "gradient against the formula")
    close(loss, expected, "value against the formula")


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
    step = prepare(row, dataclasses.replace(raw, rewards=same))
    assert step.advantages.isfinite().all(), "equal rewards give advantages that are not finite"
    if row.advantage.startswith(
        ("group_center", "leave_one_out", "mean_normalize", "pass_at_k", "top_gap")
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
