"""The objective of a row, term by term, and what features add to it: plain numbers in and out.

Models are played by `Said`, which answers with tensors that are written here.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.assembly.assembly import Assembly
from oxrl.errors import RewardError
from oxrl.functional.group_advantages import AdvantageInputs
from oxrl.recipes.features.base import Feature, FeatureInputs, Prepared
from oxrl.recipes.features.dynamic_sampling import TeachingGroups
from oxrl.recipes.features.of_rows import build_features
from oxrl.recipes.objective import Objective, estimate_advantages, prepare_update, start_of_update
from oxrl.recipes.reference_kl import subtract_kl
from oxrl.recipes.rl import minibatch
from oxrl.tables.policy import ROWS
from oxrl.types import (
    Completion,
    Output,
    PolicyBatch,
    Prompt,
    Rollout,
    RolloutBatch,
    Score,
    Segment,
    TokenBatch,
)
from support.small_runs import rl_config

NAN = float("nan")
# Two prompts of two rows; response lengths 3, 2, 1, 2 after a prompt of one token.
LENGTHS = [3, 2, 1, 2]
MASK = torch.tensor([[False] + [t < n for t in range(3)] for n in LENGTHS])
GROUPS = torch.tensor([4, 4, 9, 9])


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def on_tokens(values: list[float]) -> Tensor:
    """Eight numbers on the eight trained tokens; NaN elsewhere."""
    found = torch.full(MASK.shape, NAN, dtype=torch.float64)
    found[MASK] = f64(values)
    return found


NOW = [-1.0, -0.5, -2.0, -1.5, -0.7, -1.2, -0.3, -2.2]
OLD = [-1.1, -0.9, -1.5, -1.5, -1.0, -1.0, -0.4, -2.0]
ROLLOUT = [-1.2, -0.8, -1.4, -3.0, -1.0, -1.1, -0.4, -2.1]
REF = [-1.3, -0.2, -2.5, -1.0, -0.9, -1.2, -0.8, -2.0]
ENTROPY = [0.5, 1.0, 1.5, 0.2, 0.3, 0.9, 1.1, 0.7]
A = [1.0, 1.0, 1.0, -1.0, -1.0, 0.5, -0.5, -0.5]
WEIGHTS = [0.1, 0.2, 0.3, 0.1, 0.2, 0.4, 0.3, 0.2]


def tokens() -> TokenBatch:
    return TokenBatch(
        tokens=torch.arange(16).reshape(4, 4), attention_mask=MASK | True, response_mask=MASK
    )


def batch(**changes: Any) -> PolicyBatch:
    plain = PolicyBatch(
        inputs=tokens(),
        old_logprobs=on_tokens(OLD),
        rollout_logprobs=on_tokens(ROLLOUT),
        ref_logprobs=on_tokens(REF),
        advantages=on_tokens(A),
        loss_weights=on_tokens(WEIGHTS),
        versions=torch.full(MASK.shape, 3),
        group_ids=GROUPS,
    )
    return dataclasses.replace(plain, **changes)


class Said:
    """A model that has one answer, and remembers what it was asked."""

    def __init__(self, **answer: Tensor) -> None:
        self.answer = Output(**answer)
        self.asked: list[frozenset[str]] = []

    def forward(self, inputs: TokenBatch, want: frozenset[str]) -> Output:
        self.asked.append(want)
        return self.answer


def build(
    folder: Path, engines: dict[str, Any] | None = None, *, max_tokens: int = 6, **train: Any
) -> Objective:
    train = {"lr": 1e-3, **train}
    rollout = {"max_tokens": max_tokens}
    cfg = rl_config(folder, "run", train=train, rollout=rollout, run={"steps": 1000})
    models: dict[str, Any] = {"policy": "never asked", "critic": "none"}
    features = build_features(
        FeatureInputs(
            row=cfg.train.row,
            train=Assembly(cfg).algorithm,
            max_tokens=cfg.rollout.max_tokens,
            models=models | (engines or {}),
        )
    )
    return Objective(Assembly(cfg).algorithm, features, max_tokens=cfg.rollout.max_tokens)


def loss_and_slopes(objective: Objective, given: PolicyBatch) -> tuple[float, list[float]]:
    logprobs = on_tokens(NOW).requires_grad_()
    loss, _ = objective.policy_loss(Output(logprobs=logprobs, entropy=on_tokens(ENTROPY)), given)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert not gradient[~MASK].any()
    return loss.item(), gradient[MASK].tolist()


def ppo(x: float, a: float, low: float = 0.2, high: float = 0.28) -> tuple[float, float]:
    """Value and slope of the clipped surrogate at a log-ratio x."""
    r = math.exp(x)
    if a > 0 and r > 1 + high:
        return (1 + high) * a, 0.0
    if a < 0 and r < 1 - low:
        return (1 - low) * a, 0.0
    return r * a, r * a


PLAIN = {"alg_name": "sgrpo", "clip_low": 0.2, "clip_high": 0.28, "correction": "none", "epochs": 2}


def test_the_loss_is_the_sum_of_its_terms(tmp_path: Path) -> None:
    """Clip against the old policy, truncated weight of old against sampler, k2 to the reference and
    the entropy, each under the loss weights.
    """
    objective = build(
        tmp_path,
        **PLAIN
        | {
            "kl": "loss_k2",
            "kl_coeff": 0.3,
            "entropy_coeff": 0.07,
            "correction": "truncate",
            "correction_max": 1.5,
        },
    )
    loss, slopes = loss_and_slopes(objective, batch())
    expected = 0.0
    for i, (now, old, a, weight) in enumerate(zip(NOW, OLD, A, WEIGHTS, strict=True)):
        value, slope = ppo(now - old, a)
        correction = min(math.exp(old - ROLLOUT[i]), 1.5)
        d = now - REF[i]
        expected += weight * (-correction * value + 0.3 * d * d / 2 - 0.07 * ENTROPY[i])
        assert slopes[i] == pytest.approx(weight * (-correction * slope + 0.3 * d))
    assert loss == pytest.approx(expected)


UNUSED = "ignore:train.kl = .* has no effect:UserWarning"


@pytest.mark.filterwarnings(UNUSED)
@pytest.mark.parametrize("without", ["kl_coeff", "entropy_coeff", "reference"])
def test_a_term_that_is_not_asked_for_is_not_there(tmp_path: Path, without: str) -> None:
    numbers = {"kl": "loss_k2", "kl_coeff": 0.3, "entropy_coeff": 0.07}
    numbers |= {} if without == "reference" else {without: 0.0}
    objective = build(tmp_path, **PLAIN | numbers)
    given = batch(ref_logprobs=None) if without == "reference" else batch()
    logprobs = on_tokens(NOW).requires_grad_()
    entropy = None if without == "entropy_coeff" else on_tokens(ENTROPY)
    loss, _ = objective.policy_loss(Output(logprobs=logprobs, entropy=entropy), given)
    expected = 0.0
    for i, (now, old, a, weight) in enumerate(zip(NOW, OLD, A, WEIGHTS, strict=True)):
        expected -= weight * ppo(now - old, a)[0]
        if without == "entropy_coeff":
            expected += weight * 0.3 * (now - REF[i]) ** 2 / 2
        else:
            expected -= weight * 0.07 * ENTROPY[i]
    assert loss.item() == pytest.approx(expected)


def test_the_ratio_form_of_k3_is_measured_against_the_sampler(tmp_path: Path) -> None:
    objective = build(tmp_path, **PLAIN | {"kl": "loss_k3_ratio", "kl_coeff": 0.3})
    zero = batch(advantages=on_tokens([0.0] * 8))
    loss, slopes = loss_and_slopes(objective, zero)
    expected = 0.0
    for now, rollout, ref, weight, slope in zip(NOW, ROLLOUT, REF, WEIGHTS, slopes, strict=True):
        r, d = math.exp(now - rollout), now - ref
        expected += weight * 0.3 * r * (math.exp(-d) - 1 + d)
        assert slope == pytest.approx(weight * 0.3 * r * d)
    assert loss == pytest.approx(expected)


def test_rows_differ_in_what_their_ratio_is_measured_against(tmp_path: Path) -> None:
    """The old policy, or the sampler."""
    sampler = build(tmp_path, alg_name="dppo_tv", dppo_low=9.0, dppo_high=9.0, epochs=2)
    assert ROWS["dppo_tv"].denominator == "rollout"
    old = build(tmp_path, **PLAIN | {"clip_low": 0.99, "clip_high": 99.0})
    for objective, denominator in ((sampler, ROLLOUT), (old, OLD)):
        _, slopes = loss_and_slopes(objective, batch())
        for now, before, a, weight, slope in zip(NOW, denominator, A, WEIGHTS, slopes, strict=True):
            assert slope == pytest.approx(-weight * a * math.exp(now - before))


def test_what_was_decided_before_the_update_takes_the_place_of_a_correction(tmp_path: Path) -> None:
    """Without a correction of its own, the row takes the batch's, or none."""
    objective = build(tmp_path, **PLAIN)
    weights = [0.5, 0.0, 1.0, 2.0, 0.5, 1.0, 1.0, 0.0]
    for given, scale in ((batch(correction=on_tokens(weights)), weights), (batch(), [1.0] * 8)):
        _, slopes = loss_and_slopes(objective, given)
        for i, slope in enumerate(slopes):
            expected = -WEIGHTS[i] * scale[i] * ppo(NOW[i] - OLD[i], A[i])[1]
            assert slope == pytest.approx(expected)


def test_a_correction_of_the_current_policy_reads_it_and_the_advantages(tmp_path: Path) -> None:
    """OPSM: rows whose policy moved away by more than drift_max, where the advantage is negative.
    Row 2 moved by (-3 + 1.5 - 1 + .7) / 2 = -.9, row 4 by (-.1 + .1) / 2.
    """
    wide = {"clip_low": 0.99, "clip_high": 99.0, "kl_coeff": 0.0, "epochs": 2}
    for drift, kept in ((-1.0, False), (-0.5, True)):
        objective = build(tmp_path, alg_name="opsm", drift_max=drift, **wide)
        given = batch(old_logprobs=on_tokens([-9.0] * 8))  # the start of the update is not asked
        logprobs = on_tokens(NOW).requires_grad_()
        output = Output(logprobs=logprobs, entropy=on_tokens(ENTROPY))
        found = objective.corrected(logprobs, on_tokens([-9.0] * 8), given)
        assert found is not None and not found.requires_grad
        assert found[1, 1:3].tolist() == [float(kept)] * 2
        assert objective.policy_loss(output, given)[0].isfinite()


def test_weights_of_the_current_policy_are_numbers_to_its_gradient(tmp_path: Path) -> None:
    objective = build(tmp_path, alg_name="opsm", kl_coeff=0.0, epochs=2)

    def weigh(
        logprobs: Tensor, rollout: Tensor, mask: Tensor, *, advantages: Tensor | None = None
    ) -> Tensor:
        assert advantages is not None  # it judges the current policy
        return (logprobs - rollout).exp() * mask

    assert objective.correction is not None
    objective.correction.weigh = weigh
    logprobs = on_tokens(NOW).requires_grad_()
    found = objective.corrected(logprobs, on_tokens(OLD), batch())
    assert found is not None and found.any() and not found.requires_grad


@pytest.mark.parametrize(
    ("epochs", "chosen", "expected"),
    [
        (1, "auto", "current"),
        (2, "auto", "recompute"),
        (1, "recompute", "recompute"),
        (2, "bypass", "bypass"),
    ],
)
def test_where_old_logprobs_come_from(
    tmp_path: Path, epochs: int, chosen: str, expected: str
) -> None:
    objective = build(tmp_path, alg_name="sgrpo", epochs=epochs, old_logprobs=chosen)
    assert objective.old_logprobs == expected


def test_features_say_what_a_model_is_asked(tmp_path: Path) -> None:
    plain = build(tmp_path, **PLAIN)
    assert plain.want == {"logprobs", "entropy"} and plain.want_before == frozenset()
    simko = build(tmp_path, alg_name="simko", top_candidates=3)
    assert simko.want == {"logprobs", "entropy", "top_k=3"}
    assert simko.want_before == {"top_k=3", "entropy"}
    assert build(tmp_path, alg_name="clip_cov").want_before == {"logprobs"}
    assert build(tmp_path, alg_name="a3po").old_logprobs == "interpolated"
    m2po = build(tmp_path, alg_name="m2po")
    assert m2po.correction is None and m2po.want_before == {"logprobs"}


@pytest.mark.parametrize(
    ("correction", "expected"),
    [("none", "token"), ("truncate", "geometric"), ("mask", "geometric"), ("veto", None)],
)
def test_the_level_of_a_correction(tmp_path: Path, correction: str, expected: str | None) -> None:
    numbers = {"correction_level": "geometric"} if expected == "geometric" else {}
    cfg = rl_config(tmp_path, "run", train={"lr": 1e-3, "correction": correction, **numbers})
    objective = Objective(Assembly(cfg).algorithm, max_tokens=cfg.rollout.max_tokens)
    assert objective.correction_level == expected


def test_the_length_that_divides_is_the_longest_response_unless_told(tmp_path: Path) -> None:
    for numbers, length in (({}, 6), ({"weights_length": 11}, 11)):
        objective = build(tmp_path, alg_name="dr_grpo", **numbers)
        weights = objective.weights(MASK, GROUPS)
        assert weights[MASK].tolist() == pytest.approx([1 / (4 * length)] * 8)


def test_the_start_of_the_update_is_recorded_interpolated_or_now() -> None:
    logprobs = on_tokens(NOW).requires_grad_()
    recorded = start_of_update(logprobs, batch(ages=torch.full(MASK.shape, 2)))
    assert recorded[MASK].tolist() == OLD
    between = start_of_update(logprobs, batch(old_logprobs=None, ages=torch.full(MASK.shape, 2)))
    middle = [(now + rollout) / 2 for now, rollout in zip(NOW, ROLLOUT, strict=True)]
    assert between[MASK].tolist() == pytest.approx(middle)
    current = start_of_update(logprobs, batch(old_logprobs=None))
    assert current[MASK].tolist() == NOW
    assert not recorded.requires_grad and not between.requires_grad and not current.requires_grad


# --- before the update ---

REWARDS = [1.0, 0.0, 0.5, 0.2]


def rollouts(**changes: Any) -> RolloutBatch:
    last = torch.tensor([3, 2, 1, 2])
    token_rewards = torch.zeros(MASK.shape, dtype=torch.float64)
    token_rewards[torch.arange(4), last] = f64(REWARDS)
    plain = RolloutBatch(
        inputs=tokens(),
        rollout_logprobs=on_tokens(ROLLOUT),
        rewards=f64(REWARDS),
        token_rewards=token_rewards,
        group_ids=GROUPS,
        versions=torch.full(MASK.shape, 3),
        terminated=torch.tensor([True, False, True, True]),
        truncated=torch.tensor([False, True, False, False]),
        valid=torch.ones(4, dtype=torch.bool),
    )
    return dataclasses.replace(plain, **changes)


def prepare(
    objective: Objective, *, reference: Said | None = None, kl_coeff: float = 0.0, **changes: Any
) -> tuple[PolicyBatch, Said]:
    top = {"top_ids": torch.zeros(4, 4, 3, dtype=torch.long)}
    policy = Said(logprobs=on_tokens(OLD), entropy=on_tokens(ENTROPY), **top)
    models: Any = {"policy": policy}
    if reference is not None:
        models["reference"] = reference
    given = rollouts(**changes)
    found = prepare_update(objective, models, given, kl_coeff=kl_coeff, seed=5, version=9)
    return found, policy


@pytest.mark.parametrize(
    ("old", "expected", "asked"),
    [("recompute", OLD, 1), ("bypass", ROLLOUT, 0), ("current", None, 0)],
)
def test_the_policy_is_asked_before_the_update_only_where_it_is_needed(
    tmp_path: Path, old: str, expected: list[float] | None, asked: int
) -> None:
    objective = build(tmp_path, alg_name="sgrpo", old_logprobs=old)
    advantage = objective.advantage
    compared: list[AdvantageInputs] = []

    def noted(given: AdvantageInputs) -> Any:
        compared.append(given)
        return advantage(given)

    objective.advantage = partial(noted)
    found, policy = prepare(objective)
    assert policy.asked == [frozenset({"logprobs"})] * asked and found.ref_logprobs is None
    # The advantage may compare with them as well.
    assert compared[0].old_logprobs is found.old_logprobs
    if expected is None:
        assert found.old_logprobs is None
    else:
        assert found.old_logprobs is not None and found.old_logprobs[MASK].tolist() == expected
    assert found.versions.eq(3).all() and found.group_ids.tolist() == GROUPS.tolist()


def test_a_feature_has_the_policy_asked_for_more(tmp_path: Path) -> None:
    """And for the logprobs anyway."""
    objective = build(tmp_path, alg_name="sgrpo", old_logprobs="recompute")
    objective.want_before = frozenset({"entropy"})
    _, policy = prepare(objective)
    assert policy.asked == [frozenset({"logprobs", "entropy"})]
    current = build(tmp_path, alg_name="sgrpo")
    current.want_before = frozenset({"entropy"})
    found, policy = prepare(current)
    assert policy.asked == [frozenset({"logprobs", "entropy"})] and found.old_logprobs is None


def test_a_batch_holds_reference_advantages_and_weights(tmp_path: Path) -> None:
    """sgrpo: (R - mean) / std of two rows is +-1 / sqrt 2, on all tokens; 1/8 each."""
    objective = build(tmp_path, alg_name="sgrpo", kl="loss_k2", kl_coeff=0.1)
    reference = Said(logprobs=on_tokens(REF))
    found, _ = prepare(objective, reference=reference)
    assert reference.asked == [frozenset({"logprobs"})]
    assert found.ref_logprobs is not None and found.ref_logprobs[MASK].tolist() == REF
    half = 1 / math.sqrt(2)
    expected = [half] * 3 + [-half] * 2 + [half] + [-half] * 2
    assert found.advantages[MASK].tolist() == pytest.approx(expected, rel=1e-6)
    assert found.loss_weights[MASK].tolist() == pytest.approx([1 / 8] * 8)


@pytest.mark.parametrize("filtered", [True, False])
def test_cut_rows_are_part_of_the_baseline_and_trained_on_or_not(
    tmp_path: Path, filtered: bool
) -> None:
    objective = build(tmp_path, alg_name="sgrpo", mask_truncated=filtered)
    found, _ = prepare(objective)
    trained = MASK.clone()
    if filtered:
        trained[1] = False
    assert torch.equal(found.inputs.response_mask, trained)
    count = int(trained.sum())
    assert found.loss_weights[trained].tolist() == pytest.approx([1 / count] * count)
    assert found.advantages[0, 1].item() == pytest.approx(1 / math.sqrt(2))


@pytest.mark.filterwarnings(UNUSED)
def test_the_kl_in_the_reward_changes_what_is_compared(tmp_path: Path) -> None:
    """Against the old policy where it is known, else against the sampler."""
    for old, sampled in (("recompute", OLD), ("current", ROLLOUT)):
        objective = build(tmp_path, alg_name="rloo", kl="reward_k1", kl_coeff=0.5, old_logprobs=old)
        found, _ = prepare(objective, reference=Said(logprobs=on_tokens(REF)), kl_coeff=0.5)
        d = [s - r for s, r in zip(sampled, REF, strict=True)]
        kl = [sum(d[:3]), sum(d[3:5]), d[5], sum(d[6:])]
        r = [reward - 0.5 * k for reward, k in zip(REWARDS, kl, strict=True)]
        by_row = [r[0] - r[1], r[1] - r[0], r[2] - r[3], r[3] - r[2]]
        for row, expected in enumerate(by_row):
            assert found.advantages[row, 1].item() == pytest.approx(expected, rel=1e-6)
    none = build(tmp_path, alg_name="rloo", kl="reward_k1", kl_coeff=0.0)
    assert none.subtract_kl is None
    plain, _ = prepare(none)
    assert plain.advantages[0, 1].item() == pytest.approx(1.0)


def test_the_kl_comes_off_rows_and_tokens() -> None:
    found = subtract_kl(rollouts(), None, on_tokens(REF), kl_coeff=2.0)
    d = [s - r for s, r in zip(ROLLOUT, REF, strict=True)]
    assert found.rewards[0].item() == pytest.approx(1.0 - 2 * sum(d[:3]))
    assert found.token_rewards[0, 1].item() == pytest.approx(-2 * d[0])
    assert found.token_rewards[0, 3].item() == pytest.approx(1.0 - 2 * d[2])


def test_rewards_that_an_advantage_cannot_take_are_told_and_no_bare_error(tmp_path: Path) -> None:
    objective = build(tmp_path, alg_name="maxrl")
    half = rollouts(rewards=torch.tensor([0.5, 1.0, 0.0, 1.0], dtype=torch.float64))
    with pytest.raises(RewardError, match=r"train\.advantage: .*must be 0 or 1, got \[0\.0, 0\.5"):
        estimate_advantages(objective, half, None, Output())


def test_a_minibatch_is_normalised_over_itself(tmp_path: Path) -> None:
    objective = build(tmp_path, **PLAIN)
    part = minibatch(objective, batch(), torch.tensor([2, 1]))
    assert part.loss_weights.sum(1).tolist() == pytest.approx([1 / 3, 2 / 3])
    assert part.advantages[0, 1] == 0.5 and part.group_ids.tolist() == [9, 4]


def test_the_prompts_of_a_minibatch_are_those_of_its_own_rows(tmp_path: Path) -> None:
    """Rows 2, 1 and 3: one of prompt 4, two of prompt 9; each prompt has half of the weight."""
    objective = build(tmp_path, **PLAIN, weights="prompt_mean")
    part = minibatch(objective, batch(), torch.tensor([2, 1, 3]))
    # Tokens 1, 2 and 2 of them; prompt 9 has three, prompt 4 two.
    assert part.loss_weights.sum(1).tolist() == pytest.approx([1 / 6, 1 / 2, 1 / 3])


# --- features ---


def only(objective: Objective, kind: str) -> Any:
    (found,) = [x for x in objective.features if type(x).__name__ == kind]
    return found


def prepared(**changes: Any) -> Prepared:
    given: dict[str, Any] = {"before": Output(), "returns": None, "seed": 1, "version": 9}
    return Prepared(**{"rollouts": rollouts(), **given, **changes})


def test_a_feature_does_nothing_unless_it_says_so() -> None:
    plain = Feature(None)  # type: ignore[arg-type]
    given = batch()
    assert plain.on_minibatch(given) is given and plain.on_prepared(given, prepared()) is given
    assert plain.on_rollouts(rollouts()).rewards.tolist() == REWARDS
    assert plain.loss(Output(), given) is None and plain.steer(given, None) == {}  # type: ignore[arg-type]
    assert plain.add_gradients(torch.tensor([0]), given) == {} and not plain.holds_policy(1)
    assert plain.optim_step(skip=True) == {} and plain.after_updates(0, 1) is None
    assert not plain.greedy_baseline and not plain.moves_reference and plain.choice is None
    assert not plain.corrects_whole_step and not plain.corrects_current_policy


def test_the_kl_coefficient_is_steered_by_the_mean_kl_of_a_response(tmp_path: Path) -> None:
    objective = build(tmp_path, alg_name="ppo_rlhf", kl_coeff=0.4, kl_target=2.0, kl_horizon=50.0)
    feature = only(objective, "AdaptiveKL")
    first = torch.tensor([0, 1, 2])  # six tokens in three rows
    for given, sampled in ((batch(), OLD), (batch(old_logprobs=None), ROLLOUT)):
        given = given.select(first)
        progress = SimpleNamespace(kl_coeff=0.4)
        kl = sum(s - r for s, r in zip(sampled[:6], REF[:6], strict=True)) / 3
        assert feature.steer(given, progress) == pytest.approx({"kl/coeff": 0.4, "kl/steered": kl})
        error = min(max(kl / 2.0 - 1, -0.2), 0.2)
        assert progress.kl_coeff == pytest.approx(0.4 * (1 + error * 3 / 50))


def test_rows_that_are_not_trained_on_do_not_thin_the_kl_that_steers(tmp_path: Path) -> None:
    objective = build(tmp_path, alg_name="ppo_rlhf", kl_coeff=0.4, kl_target=0.5, kl_horizon=50.0)
    feature = only(objective, "AdaptiveKL")
    # Rows 0 and 3 are cut and masked. What is left are tokens 3 to 5, in rows 1 and 2.
    mask = MASK & torch.tensor([False, True, True, False])[:, None]
    given = batch(inputs=dataclasses.replace(tokens(), response_mask=mask))
    left = [old - reference for old, reference in zip(OLD, REF, strict=True)][3:6]
    kl = sum(left) / 2
    progress = SimpleNamespace(kl_coeff=0.4)
    steered = feature.steer(given, progress)
    assert steered == pytest.approx({"kl/coeff": 0.4, "kl/steered": kl})
    error = max(-0.2, min(0.2, kl / 0.5 - 1))
    assert progress.kl_coeff == pytest.approx(0.4 * (1 + error * 2 / 50))
    # The same as without these rows.
    alone = SimpleNamespace(kl_coeff=0.4)
    assert feature.steer(batch().select(torch.tensor([1, 2])), alone) == pytest.approx(steered)
    assert alone.kl_coeff == pytest.approx(progress.kl_coeff)


def test_a_batch_of_which_nothing_is_trained_on_does_not_steer(tmp_path: Path) -> None:
    objective = build(tmp_path, alg_name="ppo_rlhf", kl_coeff=0.4, kl_target=0.5, kl_horizon=50.0)
    feature = only(objective, "AdaptiveKL")
    given = batch(inputs=dataclasses.replace(tokens(), response_mask=MASK & False))
    progress = SimpleNamespace(kl_coeff=0.4)
    steered = feature.steer(given, progress)
    assert math.isnan(steered["kl/steered"]) and progress.kl_coeff == 0.4


def test_ages_are_counted_in_rollout_batches(tmp_path: Path) -> None:
    """Two optimizer steps per batch: a sampler behind by 1 or 2 of them is one batch old."""
    feature = only(build(tmp_path, alg_name="a3po", epochs=2), "InterpolatedAnchor")
    assert feature.updates == 2
    versions = torch.tensor([[9, 8, 7, 6]] * 4)
    found = feature.on_prepared(batch(versions=versions), prepared(version=9))
    assert found.ages.tolist() == [[0, 1, 1, 2]] * 4


def test_the_penalty_of_long_responses_is_paid_on_the_last_token(tmp_path: Path) -> None:
    """At most 6 tokens; a buffer of 4 costs 1/4 for the third token, a default one of 1 nothing."""
    feature = only(build(tmp_path, alg_name="dapo", overlong_buffer=4), "OverlongPenalty")
    found = feature.on_rollouts(rollouts())
    penalty = [-0.25, 0.0, 0.0, 0.0]
    expected = [r + p for r, p in zip(REWARDS, penalty, strict=True)]
    assert found.rewards.tolist() == pytest.approx(expected)
    difference = found.token_rewards - rollouts().token_rewards
    assert difference[0].tolist() == [0.0, 0.0, 0.0, -0.25] and not difference[1:].any()
    default = only(build(tmp_path, alg_name="dapo"), "OverlongPenalty")
    assert (default.max_tokens, default.buffer_tokens) == (6, 1)
    assert default.on_rollouts(rollouts()).rewards.tolist() == REWARDS
    for longest, buffer in ((29, 5), (3, 1)):
        given = only(build(tmp_path, alg_name="dapo", max_tokens=longest), "OverlongPenalty")
        assert given.buffer_tokens == buffer  # a fifth, at least 1
    whole = only(build(tmp_path, alg_name="dapo", overlong_buffer=6), "OverlongPenalty")
    paid = whole.on_rollouts(rollouts()).token_rewards - rollouts().token_rewards
    assert paid[2].tolist() == pytest.approx([0.0, -1 / 6, 0.0, 0.0])  # a response of one token
    long = only(build(tmp_path, alg_name="dapo", overlong_buffer=5), "OverlongPenalty")
    assert long.on_rollouts(rollouts()).rewards.tolist() == pytest.approx([0.6, -0.2, 0.5, 0.0])


def test_right_responses_are_made_likelier(tmp_path: Path) -> None:
    """Only the first row's reward is above one half; its tokens share the weight of 1."""
    feature = only(build(tmp_path, alg_name="vapo", nll_coeff=0.3), "PositiveNLL")
    marked = feature.on_prepared(batch(), prepared())
    assert marked.likelihood_weights[0].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert not marked.likelihood_weights[1:].any()
    spoiled = dataclasses.replace(marked, likelihood_weights=marked.likelihood_weights * 7)
    part = feature.on_minibatch(spoiled.select(torch.tensor([0, 2])))
    assert part.likelihood_weights.sum().item() == pytest.approx(1.0)
    objective = build(tmp_path, **PLAIN)
    objective.features = [feature]
    through = minibatch(objective, spoiled, torch.tensor([0, 2]))
    assert through.likelihood_weights is not None
    assert through.likelihood_weights.sum().item() == pytest.approx(1.0)
    two = dataclasses.replace(rollouts(), rewards=f64([1.0, 0.9, 0.5, 0.2]))
    both = feature.on_prepared(batch(), prepared(rollouts=two))
    second = feature.on_minibatch(both.select(torch.tensor([1, 3])))
    assert second.likelihood_weights[0].tolist() == pytest.approx([0, 0.5, 0.5, 0])
    logprobs = on_tokens(NOW).requires_grad_()
    loss, metrics = feature.loss(Output(logprobs=logprobs), marked)
    mean = sum(NOW[:3]) / 3
    assert loss.item() == pytest.approx(-0.3 * mean)
    assert metrics["update/nll"].item() == pytest.approx(-mean)
    assert not metrics["update/nll"].requires_grad
    assert torch.autograd.grad(loss, logprobs)[0][0].tolist() == pytest.approx([0.0] + [-0.1] * 3)


def test_terms_of_features_are_added_to_the_loss(tmp_path: Path) -> None:
    class Extra(Feature):
        def loss(self, output: Output, batch: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return f64(2.5), {"update/extra": f64(1.0)}

    objective = build(tmp_path, **PLAIN)
    plain, _ = loss_and_slopes(objective, batch())
    objective.features = [Feature(None), Extra(None), Extra(None)]  # type: ignore[arg-type]
    output = Output(logprobs=on_tokens(NOW), entropy=on_tokens(ENTROPY))
    loss, metrics = objective.policy_loss(output, batch())
    assert loss.item() == pytest.approx(plain + 5.0)
    assert metrics["update/extra"] == 1.0 and "update/weight_mean" in metrics


def test_a_correction_of_the_whole_step_is_decided_once(tmp_path: Path) -> None:
    """M2PO: of (log rho)^2 only 1.5^2 of the fourth token is far."""
    feature = only(build(tmp_path, alg_name="m2po", second_moment_max=0.04), "StepCorrection")
    said = Output(logprobs=on_tokens(OLD))
    found = feature.on_prepared(batch(), prepared(before=said))
    assert found.correction[MASK].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    assert feature.corrects_whole_step and feature.want_before == {"logprobs"}


def test_tokens_are_chosen_by_the_seed_and_by_what_the_policy_said(tmp_path: Path) -> None:
    feature = only(build(tmp_path, alg_name="kl_cov", cov_fraction=0.25), "TokenSelection")
    said = Output(logprobs=on_tokens(OLD))
    found = feature.on_prepared(batch(), prepared(before=said))
    mean_a, mean_l = sum(A) / 8, sum(OLD) / 8
    covariances = [(a - mean_a) * (l - mean_l) for a, l in zip(A, OLD, strict=True)]
    best = sorted(range(8), key=lambda i: -covariances[i])[:2]
    assert found.signals["selected"][MASK].nonzero().flatten().tolist() == sorted(best)
    random = only(
        build(tmp_path, alg_name="clip_cov", cov_fraction=0.25, cov_low=-9, cov_high=9),
        "TokenSelection",
    )
    chosen = [
        random.on_prepared(batch(), prepared(before=said, seed=seed)).signals["selected"]
        for seed in (1, 1, 2, 3, 4)
    ]
    assert torch.equal(chosen[0], chosen[1])
    assert not all(torch.equal(chosen[0], other) for other in chosen[2:])
    assert all(int(x.sum()) == 2 for x in chosen)


@pytest.mark.filterwarnings(UNUSED)
def test_the_greedy_response_is_the_baseline_of_its_prompt(tmp_path: Path) -> None:
    objective = build(tmp_path, alg_name="remax", kl_coeff=0.0)
    assert only(objective, "GreedyBaseline").greedy_baseline
    found, _ = prepare(objective, greedy_rewards=f64([0.25, 0.25, 1.0, 1.0]))
    expected = [0.75, -0.25, -0.5, -0.8]
    assert found.advantages[torch.arange(4), 1].tolist() == pytest.approx(expected)


class Engine(Said):
    """A model that is also trained: it writes down what is done to it."""

    def __init__(self, **answer: Tensor) -> None:
        super().__init__(**answer)
        self.done: list[str] = []
        self.seen: Any = None
        self.loss = 0.0

    def forward_backward(self, batch: Any, loss_fn: Any, want: frozenset[str]) -> Output:
        self.seen = batch
        self.loss = float(loss_fn(self.answer, batch)[0])
        return self.answer

    def optim_step(self) -> dict[str, float]:
        self.done.append("step")
        return {"update/skipped": 0.0, "update/lr": 0.5}

    def skip_step(self) -> dict[str, float]:
        self.done.append("skip")
        return {"update/skipped": 1.0, "update/lr": 0.5}

    def weights(self) -> list[list[str]]:
        return [["a", "b"], ["c"]]

    def set_weights(self, named: Any) -> None:
        self.done.append("".join(named))


def test_a_critic_learns_the_returns_beside_the_policy(tmp_path: Path) -> None:
    """Values 0.5 everywhere, returns the reward of the row: one half the mean square."""
    critic = Engine(values=on_tokens([0.5] * 8), bootstrap=f64([0.0] * 4))
    objective = build(
        tmp_path,
        {"critic": critic},
        alg_name="ppo",
        value_clip=0.1,
        critic_warmup_steps=2,
        gae_lambda=1.0,
    )
    feature = only(objective, "Critic")
    assert [feature.holds_policy(step) for step in (1, 2, 3)] == [True, True, False]
    found, _ = prepare(objective)
    rows = torch.tensor([0, 2])
    critic.answer = critic.answer.select(rows)
    metrics = feature.add_gradients(rows, found.select(rows))
    assert critic.seen.loss_weights.sum().item() == pytest.approx(1.0)
    returns = [1.0] * 3 + [0.5]
    expected = sum((r - 0.5) ** 2 / 2 for r in returns) / 4
    assert critic.loss == pytest.approx(expected)
    assert metrics["value/loss"] == pytest.approx(expected)
    assert metrics["value/return_mean"] == pytest.approx(3.5 / 4)
    assert "update/loss" not in metrics
    assert feature.optim_step(skip=False) == {"value/skipped": 0.0, "value/lr": 0.5}
    assert feature.optim_step(skip=True) == {"value/skipped": 1.0, "value/lr": 0.5}
    assert critic.done == ["step", "skip"]
    critic.answer = Output(values=on_tokens([NAN] * 8))
    assert feature.add_gradients(torch.arange(4), found) is None


def test_the_critics_values_are_clipped_around_what_they_were(tmp_path: Path) -> None:
    critic = Engine(values=on_tokens([0.5] * 8), bootstrap=f64([0.0] * 4))
    numbers = {"alg_name": "ppo", "value_clip": 0.1, "gae_lambda": 1.0}
    objective = build(tmp_path, {"critic": critic}, **numbers)
    found, _ = prepare(objective)
    rows = torch.tensor([0])
    critic.answer = Output(values=on_tokens([0.9] * 8)).select(rows)
    only(objective, "Critic").add_gradients(rows, found.select(rows))
    assert critic.loss == pytest.approx((0.6 - 1.0) ** 2 / 2)


def test_the_reference_becomes_the_policy_on_schedule(tmp_path: Path) -> None:
    policy, reference = Engine(), Engine()
    numbers = {"alg_name": "prorl", "reference_sync_steps": 4}
    feature = only(
        build(tmp_path, {"policy": policy, "reference": reference}, **numbers), "ReferenceReset"
    )
    assert feature.moves_reference
    for before, step in ((0, 3), (4, 5), (4, 7)):
        feature.after_updates(before, step)
    assert reference.done == policy.done == []
    feature.after_updates(3, 4)
    feature.after_updates(6, 9)
    assert reference.done == policy.done == ["abc", "abc"]
    alone = only(build(tmp_path, {"policy": policy}, **numbers), "ReferenceReset")
    alone.after_updates(3, 4)
    assert policy.done == ["abc", "abc"]


def sampled(rewards: dict[int, list[float | None]]) -> list[Rollout]:
    """Rollouts of groups with these rewards; None was not scored."""
    segment = Segment(token_ids=(1,), logprobs=(-0.1,), versions=(0,))
    completion = Completion(segments=(segment,), text="x", finish_reason="stop")
    prompt = Prompt(uid="p", messages=(), token_ids=(1,))
    return [
        Rollout(
            prompt=prompt,
            completion=completion,
            score=Score(value=value, status="ok" if value is not None else "error"),
            group_id=group,
            sample=i,
            seed=0,
        )
        for group, values in rewards.items()
        for i, value in enumerate(values)
    ]


def test_prompts_are_drawn_until_enough_groups_teach() -> None:
    choice = TeachingGroups(rounds=3)
    found = sampled({5: [1, 0], 2: [1, 1], 8: [0, 0.5], 3: [0, None], 9: [0, 1]})
    assert choice.groups(found, wanted=2) == (5, 8)
    assert choice.groups(found, wanted=9) == (5, 8, 9)
    assert choice.groups(sampled({7: [1, 1], 2: [0, 0]}), wanted=1) == (7,)
    # Three of five groups teach: for 5 wanted, 2 missing at 3/5 are ceil(10/3) = 4 more.
    assert choice.missing(found, wanted=5, rounds=1) == 4
    assert choice.missing(found, wanted=5, rounds=2) == 4
    assert choice.missing(found, wanted=5, rounds=3) == 0
    assert choice.missing(found, wanted=3, rounds=1) == 0
    assert choice.missing(found, wanted=4, rounds=1) == 2
    nobody = sampled({1: [1, 1], 2: [0, 0], 3: [0, 0]})
    assert choice.missing(nobody, wanted=2, rounds=1) == 2  # never more than wanted
    assert choice.missing(sampled({1: [1, 0]}), wanted=30, rounds=1) == 29
    assert choice.missing(nobody, wanted=30, rounds=1) == 30
