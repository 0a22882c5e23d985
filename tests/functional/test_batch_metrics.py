from __future__ import annotations

import math

import pytest
import torch

from oxrl.functional.corrections import (
    mask_weights,
    second_moment_mask,
    truncate_weights,
)
from oxrl.functional.metrics import (
    advantage_metrics,
    data_metrics,
    mismatch_metrics,
    policy_metrics,
    quantile,
    reward_metrics,
    staleness_metrics,
    value_metrics,
)

NAN = float("nan")
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
LOG_RHO = torch.tensor([[0.1, -0.2, 0.3, 1.2], [0, 0.05, -0.1, NAN]], dtype=torch.float64)
ROLLOUT = torch.full((2, 4), -1.0, dtype=torch.float64)


def test_groups_that_cannot_teach_are_counted_apart() -> None:
    rewards = torch.tensor([1.0, 1, 0, 0, 1, 0], dtype=torch.float64)
    metrics = reward_metrics(rewards, torch.tensor([8, 8, 2, 2, 5, 5]))
    assert metrics["reward/mean"] == 0.5 and metrics["reward/pass_rate"] == 0.5
    assert metrics["reward/zero_variance_groups"] == pytest.approx(2 / 3)
    assert (
        metrics["reward/all_pass_groups"]
        == metrics["reward/all_fail_groups"]
        == pytest.approx(1 / 3)
    )
    assert metrics["reward/group_std"] == pytest.approx(math.sqrt(0.5) / 3)


def test_lengths_of_right_and_wrong_answers_are_told_apart() -> None:
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])
    metrics = data_metrics(mask, torch.tensor([False, True, False]), torch.tensor([1.0, 0.0, 0.0]))
    assert (
        metrics["data/tokens"] == 7
        and metrics["data/rows"] == 2
        and metrics["data/empty_rows"] == 1
    )
    assert metrics["data/length_correct"] == 4 and metrics["data/length_wrong"] == 1.5
    assert (
        metrics["data/truncated_frac"] == pytest.approx(1 / 3) and metrics["data/length_max"] == 4
    )


def test_staleness_is_the_distance_in_weight_versions() -> None:
    versions = torch.tensor([[5, 5, 4, 3], [5, 5, 5, -1]])
    assert staleness_metrics(versions, MASK, version=5) == {
        "data/staleness_mean": pytest.approx(3 / 7),
        "data/staleness_max": 2.0,
    }


def test_advantage_metrics_read_trained_tokens_only() -> None:
    advantages = torch.tensor([[1.0, 1, -2, 0], [1, 1, 1, NAN]])
    metrics = advantage_metrics(advantages, MASK)
    assert metrics["advantage/mean"] == pytest.approx(3 / 7) and metrics["advantage/abs_max"] == 2
    assert metrics["advantage/positive_frac"] == pytest.approx(5 / 7)


def test_the_mismatch_of_the_worked_example() -> None:
    """E8; mean k3 of the rows: .298469 over 4 tokens, .002036 over 3."""
    correction = truncate_weights(ROLLOUT + LOG_RHO, ROLLOUT, MASK)
    metrics = mismatch_metrics(ROLLOUT + LOG_RHO, ROLLOUT, MASK, correction)
    assert metrics["mismatch/kl_k3"] == pytest.approx((4 * 0.298469 + 3 * 0.002036) / 7, abs=1e-6)
    assert metrics["mismatch/kl_k1"] == pytest.approx(-1.35 / 7)
    assert metrics["mismatch/chi2_token"] == pytest.approx(1.522989, abs=1e-6)
    assert metrics["mismatch/chi2_seq"] == pytest.approx(
        (4.0552**2 + 0.951229**2) / 2 - 1, abs=1e-4
    )
    assert metrics["mismatch/ess"] == pytest.approx(0.909575, abs=1e-6)
    assert metrics["mismatch/abs_logdiff_max"] == pytest.approx(1.2)
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(math.exp(-(1.4 / 4 - 0.05 / 3) / 2))
    assert (
        metrics["mismatch/trunc_frac_hi"] == pytest.approx(1 / 7)
        and metrics["mismatch/trunc_frac_lo"] == 0
    )


def test_rejected_tokens_and_rows_are_counted() -> None:
    old = ROLLOUT + LOG_RHO
    correction = mask_weights(
        old, ROLLOUT, MASK, correction_level="geometric", correction_min=0.9, correction_max=1.1
    )
    metrics = mismatch_metrics(old, ROLLOUT, MASK, correction, correction_level="geometric")
    assert metrics["mismatch/reject_frac_token"] == pytest.approx(4 / 7)
    assert metrics["mismatch/reject_frac_row"] == 0.5


def test_a_correction_that_only_keeps_or_drops_cuts_no_weight() -> None:
    old = ROLLOUT + LOG_RHO
    correction = second_moment_mask(old, ROLLOUT, MASK)
    metrics = mismatch_metrics(old, ROLLOUT, MASK, correction, correction_level=None)
    assert metrics["mismatch/trunc_frac_hi"] == metrics["mismatch/trunc_frac_lo"] == 0
    assert metrics["mismatch/reject_frac_token"] == pytest.approx(1 / 7)
    row_weights = truncate_weights(
        old, ROLLOUT, MASK, correction_level="sequence", correction_max=2.0
    )
    metrics = mismatch_metrics(old, ROLLOUT, MASK, row_weights, correction_level="sequence")
    assert (
        metrics["mismatch/trunc_frac_hi"] == pytest.approx(4 / 7)
        and metrics["mismatch/trunc_frac_lo"] == 0
    )


def test_equal_policies_show_no_mismatch_and_unit_ratios() -> None:
    logprobs = torch.where(MASK, -0.5, NAN)
    assert set(mismatch_metrics(logprobs, logprobs, MASK).values()) <= {0.0, 1.0}
    metrics = policy_metrics(
        logprobs, logprobs, MASK, ref_logprobs=logprobs, entropy=torch.where(MASK, 1.5, NAN)
    )
    assert all(
        metrics[f"update/ratio_{kind}"] == 1.0 for kind in ("mean", "min", "max", "p01", "p99")
    )
    assert (
        metrics["kl/old_k3"]
        == metrics["kl/ref_k1"]
        == metrics["kl/ref_k3"]
        == metrics["kl/ref_row_sum"]
        == 0.0
    )
    assert metrics["policy/entropy"] == 1.5


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.95, 1.0])
def test_a_quantile_lies_between_neighbors_as_in_torch(fraction: float) -> None:
    x = torch.randn(37, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert quantile(x, fraction) == pytest.approx(float(x.quantile(fraction)), abs=1e-14)
    assert quantile(x[:1], fraction) == float(x[0])


def test_a_step_may_have_more_tokens_than_the_quantile_of_torch_takes() -> None:
    tokens = 2**24 + 1
    with pytest.raises(RuntimeError, match="too large"):
        torch.zeros(tokens).quantile(0.5)
    assert quantile(torch.linspace(0, 1, tokens, dtype=torch.float64), 0.25) == pytest.approx(0.25)


def test_reference_kls_are_per_token_and_per_row() -> None:
    logprobs, reference = (
        torch.full((2, 4), -0.5, dtype=torch.float64),
        torch.full((2, 4), -1.2, dtype=torch.float64),
    )
    metrics = policy_metrics(logprobs, logprobs, MASK, ref_logprobs=reference)
    assert metrics["kl/ref_k1"] == pytest.approx(0.7) and metrics["kl/ref_k3"] == pytest.approx(
        0.196585, abs=1e-6
    )
    assert metrics["kl/ref_row_sum"] == pytest.approx(0.7 * 3.5)


def test_the_critic_that_predicts_the_returns_explains_them_all() -> None:
    returns = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, NAN]])
    assert value_metrics(returns, returns, MASK)["value/explained_variance"] == 1.0
    assert value_metrics(0 * returns, returns, MASK)["value/explained_variance"] == 0.0


def test_an_empty_batch_has_finite_metrics() -> None:
    empty, zeros = torch.zeros(1, 2, dtype=torch.bool), torch.full((1, 2), NAN)
    every = [
        advantage_metrics(zeros, empty),
        policy_metrics(zeros, zeros, empty, ref_logprobs=zeros, entropy=zeros),
        mismatch_metrics(zeros, zeros, empty),
        value_metrics(zeros, zeros, empty),
        data_metrics(empty, torch.tensor([False]), torch.tensor([0.0])),
        staleness_metrics(torch.zeros(1, 2, dtype=torch.long), empty, version=3),
    ]
    # Nobody was right, so right answers have no length.
    assert math.isnan(every[4].pop("data/length_correct"))
    assert all(math.isfinite(value) for metrics in every for value in metrics.values())
