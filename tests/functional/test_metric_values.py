"""Every metric on a small batch, by hand arithmetic written out in plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from oxrl.functional.gates import ppo_clip
from oxrl.functional.group_advantages import group_normalize
from oxrl.functional.metrics import (
    advantage_metrics,
    data_metrics,
    mismatch_metrics,
    policy_metrics,
    quantile,
    reward_metrics,
    row_metrics,
    staleness_metrics,
    value_metrics,
)
from oxrl.functional.policy_losses import cispo, sapo

NAN = float("nan")
MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows(flat: list[float]) -> Tensor:
    """Five numbers on the five trained tokens of MASK, NaN elsewhere."""
    a, b, c, d, e = flat
    return f64([[a, b, c], [d, e, NAN], [NAN, NAN, NAN]])


def check(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_rewards_of_four_groups() -> None:
    """Group 7: 1, 0.9, 0 and 0.5; group 2: 0.6, 0.6; groups 4 and 9 alone, not solved. A reward of
    exactly 0.5 is not solved. The first row is a group of its own.
    """
    listed = [0.5, 1, 0.6, 0, 0.6, 0.5, 0.9, 0.2]
    found = reward_metrics(f64(listed), torch.tensor([4, 7, 2, 7, 2, 7, 7, 9]))
    check(
        found,
        {
            "reward/mean": 4.3 / 8,
            "reward/std": statistics.stdev(listed),
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/pass_rate": 4 / 8,
            "reward/zero_variance_groups": 3 / 4,
            "reward/all_pass_groups": 1 / 4,
            "reward/all_fail_groups": 2 / 4,
            # Unbiased, as advantages have it; of one row, and of equal ones, 0.
            "reward/group_std": statistics.stdev([1, 0, 0.5, 0.9]) / 4,
        },
    )
    assert reward_metrics(f64([]), torch.tensor([], dtype=torch.long)) == {}
    assert reward_metrics(f64([0.5]), torch.tensor([4]))["reward/std"] == 0.0
    assert reward_metrics(f64([0.0, 1.0]), torch.tensor([4, 5]))["reward/std"] == math.sqrt(0.5)


def test_the_variance_of_equal_rewards_is_not_below_zero() -> None:
    """As rounding would make mean(r^2) - mean(r)^2 of three rewards of 0.1."""
    for reward in (0.1, 0.2, 0.3, 0.7, 1 / 3):
        for size in range(2, 9):
            ids = torch.zeros(size, dtype=torch.long)
            found = reward_metrics(f64([reward] * size), ids)["reward/group_std"]
            assert found == pytest.approx(0.0, abs=1e-7)


def test_lengths_of_right_and_wrong_answers() -> None:
    mask = torch.cat([MASK, torch.tensor([[False, True, False]])])
    found = data_metrics(mask, torch.tensor([True, False, False, False]), f64([0.5, 0.6, 1.0, 0]))
    check(
        found,
        {
            "data/tokens": 6.0,
            "data/rows": 3.0,
            "data/empty_rows": 1.0,
            "data/length_mean": 6 / 4,
            "data/length_p95": 2 + 0.85 * 1,  # of 0, 1, 2, 3, at place 0.95 * 3
            "data/length_max": 3.0,
            "data/length_correct": 1.0,
            "data/length_wrong": 2.0,
            "data/truncated_frac": 1 / 4,
        },
    )
    nothing = data_metrics(MASK[:0], torch.zeros(0, dtype=torch.bool), f64([]))
    check(nothing, {"data/tokens": 0.0, "data/rows": 0.0, "data/empty_rows": 0.0})


def test_the_length_of_right_answers_is_not_a_number_where_none_is_right() -> None:
    cut = torch.zeros(3, dtype=torch.bool)
    for reward, there, nothing in ((0.0, "wrong", "correct"), (1.0, "correct", "wrong")):
        found = data_metrics(MASK, cut, f64([reward] * 3))
        assert math.isnan(found[f"data/length_{nothing}"])
        assert found[f"data/length_{there}"] == pytest.approx(5 / 3)


def test_the_deviation_of_a_group_is_the_one_that_advantages_divide_by() -> None:
    rewards = f64([1.0, 0.0, 0.0, 3.0])
    ids = torch.zeros(4, dtype=torch.long)
    # Mean 1, squared distances 0 + 1 + 1 + 4, over 4 - 1.
    std = reward_metrics(rewards, ids)["reward/group_std"]
    assert std == pytest.approx(math.sqrt(2.0))
    assert group_normalize(rewards, ids, eps=0.0).tolist() == pytest.approx(
        [0.0, -1 / std, -1 / std, 2 / std]
    )


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(0.0, 1.0), (0.1, 1.3), (0.5, 2.5), (2 / 3, 3.0), (0.9, 8.0 - 0.3 * 5), (1.0, 8.0)],
)
def test_a_quantile_of_four_numbers(fraction: float, expected: float) -> None:
    assert quantile(f64([3, 1, 8, 2]), fraction) == pytest.approx(expected)


def test_staleness_and_advantages() -> None:
    versions = torch.tensor([[4, 4, 2], [3, 1, 9], [9, 9, 9]])
    found = staleness_metrics(versions, MASK, version=5)
    check(found, {"data/staleness_mean": (1 + 1 + 3 + 2 + 4) / 5, "data/staleness_max": 4.0})
    values = [1.0, 0.0, -3.0, 2.0, 0.0]
    check(
        advantage_metrics(rows(values), MASK),
        {
            "advantage/mean": 0.0,
            "advantage/std": statistics.stdev(values),
            "advantage/abs_max": 3.0,
            "advantage/positive_frac": 2 / 5,
        },
    )
    one = torch.tensor([[True, False, False]] + [[False] * 3] * 2)
    assert advantage_metrics(rows(values), one)["advantage/std"] == 0.0
    assert staleness_metrics(versions, torch.zeros_like(MASK), version=5) == {
        "data/staleness_mean": 0.0,
        "data/staleness_max": 0.0,
    }


D = [0.5, -0.4, 0.0, 25.0, -22.0]  # two of five beyond the clamp
NEAR = [0.5, -0.4, 0.0, 20.0, -20.0]


def test_the_policy_against_its_old_self() -> None:
    """kl/old_k3 estimates KL(old || current): r - 1 - log r with r = current / old, in this
    direction.
    """
    now = [-1.0, -2.0, -3.0, -1.5, -2.5]
    old = [n - d for n, d in zip(now, D, strict=True)]
    found = policy_metrics(rows(now), rows(old), MASK)
    ratios = sorted(math.exp(x) for x in NEAR)
    check(
        found,
        {
            "policy/logprob_mean": -2.0,
            "update/ratio_mean": statistics.fmean(ratios),
            "update/ratio_std": statistics.stdev(ratios),
            "update/ratio_min": ratios[0],
            "update/ratio_max": ratios[-1],
            "update/ratio_p01": ratios[0] + 0.04 * (ratios[1] - ratios[0]),
            "update/ratio_p99": ratios[3] + 0.96 * (ratios[4] - ratios[3]),
            "update/ratio_clamped_frac": 2 / 5,
            "kl/old_k3": statistics.fmean(math.exp(x) - 1 - x for x in NEAR),
        },
    )


@pytest.mark.parametrize("d", [2.0, -2.0, 0.3])
def test_the_kl_to_the_old_policy_has_a_direction(d: float) -> None:
    now = rows([-3.0] * 5)
    old = rows([-3.0 - d] * 5)
    found = policy_metrics(now, old, MASK)["kl/old_k3"]
    assert found == pytest.approx(math.exp(d) - 1 - d)
    assert found != pytest.approx(math.exp(-d) - 1 + d, rel=0.05)


def test_the_policy_against_its_reference() -> None:
    """kl/ref_k3 estimates KL(current || reference): exp(-d) - 1 + d."""
    now = [-1.0, -2.0, -3.0, -1.5, -2.5]
    reference = [n - d for n, d in zip(now, D, strict=True)]
    entropy = rows([1.0, 2.0, 3.0, 4.0, 6.0])
    found = policy_metrics(
        rows(now), rows(now), MASK, ref_logprobs=rows(reference), entropy=entropy
    )
    assert found["policy/entropy"] == pytest.approx(16 / 5)
    assert found["kl/ref_k1"] == pytest.approx(sum(NEAR) / 5)
    assert found["kl/ref_k3"] == pytest.approx(sum(math.exp(-x) - 1 + x for x in NEAR) / 5)
    # Rows without a trained token are no responses.
    assert found["kl/ref_row_sum"] == pytest.approx((0.1 + 0.0) / 2)
    assert found["kl/clamped_frac"] == pytest.approx(2 / 5)
    without = policy_metrics(rows(now), rows(now), MASK)
    assert {"policy/entropy", "kl/ref_k1", "kl/clamped_frac"}.isdisjoint(without)


RHO = [0.5, -0.4, 0.1, 1.2, -0.2]


def test_the_mismatch_between_trainer_and_sampler() -> None:
    rollout = [-1.0, -0.5, -0.2, -1.9, -0.7]
    old = [s + x for s, x in zip(rollout, RHO, strict=True)]
    found = mismatch_metrics(rows(old), rows(rollout), MASK)
    moved = [abs(math.exp(o) - math.exp(s)) for o, s in zip(old, rollout, strict=True)]
    first, second = sum(RHO[:3]), sum(RHO[3:])
    check(
        found,
        {
            "mismatch/abs_logdiff_mean": sum(map(abs, RHO)) / 5,
            "mismatch/abs_logdiff_max": 1.2,
            "mismatch/kl_k1": -sum(RHO) / 5,
            "mismatch/kl_k3": sum(math.exp(x) - 1 - x for x in RHO) / 5,
            "mismatch/prob_diff_max": max(moved),
            "mismatch/ppl_ratio": math.exp(-(first / 3 + second / 2) / 2),
            "mismatch/chi2_token": sum(math.exp(2 * x) for x in RHO) / 5 - 1,
            "mismatch/chi2_seq": (math.exp(2 * first) + math.exp(2 * second)) / 2 - 1,
        },
    )


def test_a_mismatch_beyond_the_clamp_is_measured_before_it() -> None:
    rollout = rows([-30.0] * 5)
    old = rows([-30.0 + x for x in (25.0, -22.0, 0.0, 30.0, 0.0)])
    found = mismatch_metrics(old, rollout, MASK)
    assert found["mismatch/abs_logdiff_max"] == 30.0
    assert found["mismatch/kl_k1"] == pytest.approx(-(20 - 20 + 20) / 5)
    assert found["mismatch/chi2_seq"] == pytest.approx((math.exp(6) + math.exp(40)) / 2 - 1)


def test_what_a_correction_did_is_counted_by_token_and_by_row() -> None:
    """Weights: unchanged, cut from above, raised from below, dropped; a whole row dropped."""
    mask = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
    rho = f64([[1.5, 4.0, 0.1, 0.7], [0.9, 1.1, NAN, NAN], [NAN] * 4])
    weights = f64([[1.5, 2.0, 0.5, 0.0], [0.0, 0.0, NAN, NAN], [NAN] * 4])
    found = mismatch_metrics(rho.log(), torch.where(mask, 0.0, NAN).double(), mask, weights)
    assert found["mismatch/weight_mean"] == pytest.approx(4 / 6)
    assert found["mismatch/ess"] == pytest.approx(16 / (6 * (2.25 + 4 + 0.25)))
    assert found["mismatch/trunc_frac_hi"] == pytest.approx(1 / 6)
    assert found["mismatch/trunc_frac_lo"] == pytest.approx(1 / 6)
    assert found["mismatch/reject_frac_token"] == pytest.approx(3 / 6)
    assert found["mismatch/reject_frac_row"] == pytest.approx(1 / 2)
    nothing = mismatch_metrics(rho.log(), 0 * rho, mask, torch.zeros_like(rho))
    assert nothing["mismatch/ess"] == 0.0 and nothing["mismatch/reject_frac_row"] == 1.0


def test_a_weight_within_a_millionth_of_its_ratio_is_not_cut() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    near = f64([[1 - 0.9e-6, 1 + 0.9e-6, 1 - 1e-6, 1 + 1e-6]])
    found = mismatch_metrics(zeros, zeros, mask, near)
    assert found["mismatch/trunc_frac_hi"] == found["mismatch/trunc_frac_lo"] == 0
    far = f64([[1 - 1.1e-6, 1 + 1.1e-6, 1, 0.5]])
    found = mismatch_metrics(zeros, zeros, mask, far)
    assert found["mismatch/trunc_frac_hi"] == 0.5 and found["mismatch/trunc_frac_lo"] == 0.25


def test_the_largest_change_of_probability_may_be_a_fall() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = mismatch_metrics(f64([[0.5, 0.3]]).log(), f64([[0.4, 0.9]]).log(), mask)
    assert found["mismatch/prob_diff_max"] == pytest.approx(0.6)


def test_metrics_may_be_asked_of_what_carries_a_gradient() -> None:
    leaves = [rows([-1.0] * 5).requires_grad_() for _ in range(2)]
    for first, second in (leaves, [x.detach() for x in leaves]):
        assert policy_metrics(first, second, MASK, ref_logprobs=second)["kl/old_k3"] == 0.0
        assert mismatch_metrics(first, second, MASK)["mismatch/kl_k1"] == 0.0
        assert value_metrics(first, second, MASK)["value/error"] == 0.0
        assert advantage_metrics(first, MASK)["advantage/mean"] == -1.0


def test_a_weight_is_compared_with_the_ratio_of_its_own_level() -> None:
    """Row ratio exp(0.3 + 0.1) = 1.49 kept as it is: nothing is cut, though each token's ratio is
    smaller. Weights that only keep or drop are compared with nothing.
    """
    mask = torch.ones(1, 2, dtype=torch.bool)
    old = f64([[0.3, 0.1]])
    kept = torch.full((1, 2), math.exp(0.4), dtype=torch.float64)
    found = mismatch_metrics(old, 0 * old, mask, kept, correction_level="sequence")
    assert found["mismatch/trunc_frac_hi"] == found["mismatch/trunc_frac_lo"] == 0
    by_token = mismatch_metrics(old, 0 * old, mask, kept)
    assert by_token["mismatch/trunc_frac_lo"] == 1
    flags = mismatch_metrics(old, 0 * old, mask, f64([[1.0, 0.0]]), correction_level=None)
    assert flags["mismatch/trunc_frac_hi"] == flags["mismatch/trunc_frac_lo"] == 0


def test_the_critics_share_of_explained_variance() -> None:
    values, returns = [1.0, 2.0, 0.0, 3.0, 1.0], [2.0, 2.5, -1.0, 3.0, 0.5]
    errors = [r - v for v, r in zip(values, returns, strict=True)]
    check(
        value_metrics(rows(values), rows(returns), MASK),
        {
            "value/mean": 7 / 5,
            "value/return_mean": 7 / 5,
            "value/error": sum(e * e for e in errors) / 5,
            "value/explained_variance": 1
            - statistics.variance(errors) / statistics.variance(returns),
        },
    )
    one = torch.tensor([[True, False, False]] + [[False] * 3] * 2)
    for mask in (one, torch.zeros_like(MASK)):
        assert value_metrics(rows(values), rows(returns), mask)["value/explained_variance"] == 0.0
    # Two tokens, returns of a variance of 1/8: the errors are 0.1 and 0.2.
    two = torch.tensor([[True, True, False]] + [[False] * 3] * 2)
    found = value_metrics(rows([0.4, 0.8, 9, 9, 9]), rows([0.5, 1.0, 9, 9, 9]), two)
    assert found["value/explained_variance"] == pytest.approx(1 - 0.005 / 0.125)


# --- the metrics of gates, where the advantage of some tokens is 0 ---

RATIOS = [0.3, 3.0, 0.5, 6.0]
MIXED = [0.0, 0.0, 1.0, -2.0]


def run(gate: object, **numbers: float) -> dict[str, float]:
    logs = f64([[math.log(r) for r in RATIOS]])
    ones = torch.ones_like(logs)
    _, metrics = gate(logs, 0 * logs, f64([MIXED]), ones.bool(), ones, **numbers)  # type: ignore[operator]
    return {name: float(value) for name, value in metrics.items()}


def test_tokens_without_an_advantage_count_in_no_weight_metric() -> None:
    """Weights of the other two: 0.5, and 6 as nothing clips a bad token from above."""
    found = run(ppo_clip)
    assert found["update/weight_mean"] == pytest.approx(6.5 / 2)
    assert found["update/weight_max"] == pytest.approx(6.0)
    assert found["update/weight_zero_frac"] == 0
    assert found["update/weight_ess"] == pytest.approx(6.5**2 / (2 * (0.25 + 36)))
    flipped = [-a for a in MIXED]
    logs = f64([[math.log(r) for r in RATIOS]])
    ones = torch.ones_like(logs)
    _, metrics = ppo_clip(logs, 0 * logs, f64([flipped]), ones.bool(), ones)
    assert metrics["update/weight_zero_frac"] == 1 and metrics["update/weight_max"] == 0
    assert metrics["update/weight_ess"] == 0


def test_cispo_counts_no_cut_where_there_is_no_advantage() -> None:
    """Of the ratios .3, 3, .5, 6 with bounds 1 and 2, the first two have no advantage."""
    found = run(cispo, weight_min=1.0, weight_max=2.0)
    assert found["update/clip_frac_high"] == 0.25 and found["update/clip_frac_low"] == 0.25


def test_a_soft_gate_reports_the_weights_of_live_tokens_only() -> None:
    found = run(sapo)
    weight = {
        r: 4 * r * s * (1 - s)
        for r, s in ((0.5, 1 / (1 + math.exp(0.5))), (6.0, 1 / (1 + math.exp(-1.05 * 5))))
    }
    assert found["update/weight_mean"] == pytest.approx(sum(weight.values()) / 2)


def test_rows_are_told_by_their_data_their_age_and_their_advantages() -> None:
    truncated = torch.tensor([True, False, False])
    rewards = f64([1, 0, 0])
    versions = torch.tensor([[4, 4, 3], [2, 4, 0], [0, 0, 0]])
    advantages = rows([1.0, -2.0, 0.5, 0.25, 3.0])
    found = row_metrics(MASK, truncated, rewards, versions, advantages, version=4)
    expected = (
        data_metrics(MASK, truncated, rewards)
        | staleness_metrics(versions, MASK, version=4)
        | advantage_metrics(advantages, MASK)
    )
    assert found == pytest.approx(expected, nan_ok=True)
    assert {name.partition("/")[0] for name in found} >= {"data", "advantage"}
