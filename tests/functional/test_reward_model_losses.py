"""Reward-model losses against hand arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oxrl.functional.reward_model_losses import bradley_terry, process_reward


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_bradley_terry_has_its_worked_values() -> None:
    """s = 1.2, .5: -log sigmoid(.7) = .403186; margin .3: -log sigmoid(.4) = .513015; centering .01
    * 1.7**2.
    """
    assert float(bradley_terry(f64(1.2), f64(0.5), f64(1))[0]) == pytest.approx(0.403186, abs=1e-6)
    assert float(bradley_terry(f64(1.2), f64(0.5), f64(1), f64(0.3))[0]) == pytest.approx(
        0.513015, abs=1e-6
    )
    centered, _ = bradley_terry(f64(1.2), f64(0.5), f64(1), center_coeff=0.01)
    assert float(centered) == pytest.approx(0.403186 + 0.0289, abs=1e-6)


def test_a_zero_head_has_loss_log_two_and_accuracy_one_half() -> None:
    loss, metrics = bradley_terry(f64(0, 0), f64(0, 0), f64(0.5, 0.5))
    assert (
        float(loss) == pytest.approx(math.log(2)) and float(metrics["reward_model/accuracy"]) == 0.5
    )


def test_bradley_terry_ignores_pairs_of_weight_zero_and_splits_into_micro_batches() -> None:
    chosen, rejected, margins = (
        f64(1, 2, 0.5, math.nan),
        f64(0, 3, 0.1, 1),
        f64(0.1, 0.2, 0.3, math.nan),
    )
    weights = f64(1 / 3, 1 / 3, 1 / 3, 0)

    def gradient(*slices: slice) -> Tensor:
        leaf = chosen.clone().requires_grad_()
        for rows in slices:
            bradley_terry(
                leaf[rows], rejected[rows], weights[rows], margins[rows], center_coeff=0.1
            )[0].backward()
        assert leaf.grad is not None
        return leaf.grad

    whole = gradient(slice(0, 4))
    assert whole.isfinite().all() and float(whole[3]) == 0.0
    torch.testing.assert_close(gradient(slice(0, 1), slice(1, 4)), whole, rtol=0, atol=1e-12)
    # By hand for the first pair: -sigmoid(-(1 - .1)) / 3 + 2 * .1 * 1 / 3.
    assert float(whole[0]) == pytest.approx((-1 / (1 + math.exp(0.9)) + 0.2) / 3, abs=1e-12)


def test_reward_model_metrics_are_over_the_pairs_that_count() -> None:
    """Scores 2, 0, 1, 1: mean 1, deviation sqrt(.5); one pair right, one tied."""
    _, metrics = bradley_terry(f64(2, 1, 9), f64(0, 1, -9), f64(0.5, 0.5, 0))
    expected = {"accuracy": 0.75, "margin": 1.0, "score_mean": 1.0, "score_std": math.sqrt(0.5)}
    assert {
        key.removeprefix("reward_model/"): float(value) for key, value in metrics.items()
    } == pytest.approx(expected)


def test_a_process_reward_reads_step_ends_only() -> None:
    """Right step at score 2: softplus(-2) = .126928; wrong step at score .5: softplus(.5) =
    .974077; mean .550503.
    """
    scores = f64(math.nan, 2, math.nan, 0.5)[None].requires_grad_()
    loss, metrics = process_reward(scores, f64(math.nan, 1, 1, 0)[None], f64(0, 0.5, 0, 0.5)[None])
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.550503, abs=1e-6)
    assert float(metrics["reward_model/accuracy"]) == 0.5
    assert scores.grad is not None
    # (sigmoid(s) - y) / 2 at the ends.
    torch.testing.assert_close(scores.grad, f64(0, -0.059601, 0, 0.311230)[None], rtol=0, atol=1e-6)


def test_a_process_reward_equals_two_class_cross_entropy_of_the_logit_difference() -> None:
    logits = torch.randn(2, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 1]])
    weights = torch.full((2, 5), 0.1, dtype=torch.float64)
    ours, _ = process_reward(logits[..., 1] - logits[..., 0], labels, weights)
    assert float(ours) == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits.view(-1, 2), labels.view(-1)))
    )


def test_process_reward_is_finite_at_huge_scores() -> None:
    scores = f64(1e6, -1e6)[None].requires_grad_()
    loss, _ = process_reward(scores, f64(0, 1)[None], f64(0.5, 0.5)[None])
    loss.backward()
    assert (
        float(loss.detach()) == pytest.approx(1e6)
        and scores.grad is not None
        and scores.grad.isfinite().all()
    )


def test_a_wrong_shape_names_the_tensor() -> None:
    with pytest.raises(ValueError, match="rejected_scores"):
        bradley_terry(f64(1, 2), f64(1), f64(0.5, 0.5))
