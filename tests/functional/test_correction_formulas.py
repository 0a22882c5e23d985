"""Corrections and KL estimators at their bounds, far out, and by finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional.corrections import (
    CORRECTIONS,
    drop_drifted_failures,
    mask_weights,
    reject_k3,
    reject_weights,
    truncate_weights,
    veto_weights,
)
from oxrl.functional.kl import KLS, add_kl_to_rewards, kl_k3_ratio
from oxrl.functional.ratios import importance_ratio

NAN = float("nan")


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of(log_rho: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Trainer, sampler and mask of one row with these log ratios, and one position masked out."""
    rollout = f64([[-1.0] * len(log_rho) + [NAN]])
    old = f64([[x - 1.0 for x in log_rho] + [NAN]])
    mask = torch.tensor([[True] * len(log_rho) + [False]])
    return old, rollout, mask


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [math.exp(0.5), math.exp(-0.2), math.exp(0.9)]),
        ("sequence", [math.exp(1.2)] * 3),
        ("geometric", [math.exp(0.4)] * 3),
    ],
)
def test_the_ratio_of_every_level(level: Any, expected: list[float]) -> None:
    old, rollout, mask = of([0.5, -0.2, 0.9])
    found = importance_ratio(old, rollout, mask, correction_level=level)
    assert found.tolist()[0] == pytest.approx([*expected, 1.0])
    assert importance_ratio(old, rollout, mask).tolist()[0][:2] == pytest.approx(
        [math.exp(0.5), math.exp(-0.2)]
    )


def test_the_ratio_carries_no_gradient() -> None:
    old, rollout, mask = of([0.5, -0.2])
    assert not importance_ratio(old.clone().requires_grad_(), rollout, mask).requires_grad
    assert not importance_ratio(old, rollout.clone().requires_grad_(), mask).requires_grad


def test_padding_vetoes_no_row() -> None:
    """A padded position counts as ratio 1, which a bound above 1 must not hold against its row."""
    old, rollout, mask = of([1.0, 1.2])
    assert veto_weights(old, rollout, mask, correction_veto=1.5).tolist() == [[1, 1, 0]]


def test_the_ratio_is_bounded_at_20_nats_either_way() -> None:
    old, rollout, mask = of([25.0, -25.0, 19.5])
    expected = [math.exp(20), math.exp(-20), math.exp(19.5), 1.0]
    assert importance_ratio(old, rollout, mask).tolist()[0] == pytest.approx(expected)


@pytest.mark.parametrize("most", [0.5, 2.0, 5.0])
def test_truncation_bounds_from_above_only(most: float) -> None:
    """A weight below every bound stays what it is: there is no lower clamp."""
    logs = [-25.0, -5.0, -0.7, 0.0, 0.5, 1.5, 25.0]
    old, rollout, mask = of(logs)
    found = truncate_weights(old, rollout, mask, correction_max=most)
    expected = [min(math.exp(max(min(x, 20.0), -20.0)), most) for x in logs]
    assert found.tolist()[0] == pytest.approx([*expected, 0.0], rel=1e-12)
    assert found[0, 0] < 1e-8


def test_bounds_are_inclusive() -> None:
    """Ratios that are exact at the bounds: 2^k."""
    rollout = torch.zeros(1, 5, dtype=torch.float64)
    ratios = f64([[0.25, 0.5, 1.0, 2.0, 4.0]])
    mask = rollout == 0
    exact = importance_ratio(ratios.log(), rollout, mask)
    low, high = exact[0, 1].item(), exact[0, 3].item()
    kept = mask_weights(ratios.log(), rollout, mask, correction_min=low, correction_max=high)
    assert kept.tolist()[0] == pytest.approx([0, 0.5, 1, 2, 0])
    flags = reject_weights(
        ratios.log(),
        rollout,
        mask,
        correction_level="token",
        correction_min=low,
        correction_max=high,
    )
    assert flags.tolist() == [[0, 1, 1, 1, 0]]
    one = mask[:, :1]
    bound = exact[0, 1].item()
    assert (
        veto_weights(ratios[:, 1:2].log(), rollout[:, :1], one, correction_veto=bound).item() == 1
    )
    tighter = bound * (1 + 1e-12)
    assert (
        veto_weights(ratios[:, 1:2].log(), rollout[:, :1], one, correction_veto=tighter).item() == 0
    )


def test_rejection_defaults_to_the_geometric_mean_within_a_thousandth() -> None:
    for mean, kept in ((0.0009, 1), (-0.0009, 1), (0.0011, 0), (-0.0011, 0)):
        old, rollout, mask = of([mean + 0.3, mean - 0.3])
        assert reject_weights(old, rollout, mask).tolist() == [[kept, kept, 0]]


@pytest.mark.parametrize("d", [1.0, -1.0, 0.4, -2.0])
def test_rejection_by_k3_has_a_direction(d: float) -> None:
    """The row's mean of rho - 1 - log rho, of which exp(-x) - 1 + x is the other direction. Both
    bounds lie within 1 % of the mean.
    """
    logs = [d, d / 2, 0.0]
    k3 = sum(math.exp(x) - 1 - x for x in logs) / 3
    old, rollout, mask = of(logs)
    kept = reject_k3(old, rollout, mask, correction_k3_max=k3 * 1.01)
    dropped = reject_k3(old, rollout, mask, correction_k3_max=k3 * 0.99)
    assert kept.tolist() == [[1, 1, 1, 0]] and dropped.tolist() == [[0, 0, 0, 0]]


def test_rejection_by_k3_keeps_what_is_at_its_bound() -> None:
    old, rollout, mask = of([0.0, 0.0])
    assert reject_k3(old, rollout, mask, correction_k3_max=0.0).tolist() == [[1, 1, 0]]


@pytest.mark.parametrize(
    ("advantages", "moved", "kept"),
    [
        ([-1.0, -1.0], 0.6, [0, 0]),
        ([-1.0, -1.0], 0.4, [1, 1]),
        ([-1.0, -1.0], -0.6, [1, 1]),  # moved towards it
        ([1.0, 1.0], 0.6, [1, 1]),
        ([0.0, 0.0], 0.6, [1, 1]),  # nothing to learn is no failure
        ([-3.0, 1.0], 0.6, [0, 1]),  # the drift is the row's, the failure the token's
    ],
)
def test_only_failures_that_the_policy_left_are_dropped(
    advantages: list[float], moved: float, kept: list[int]
) -> None:
    """One token of the row moved less than the bound, the other more: their mean decides."""
    now, rollout, mask = of([0.3 - moved, -0.3 - moved])
    signs = f64([[*advantages, NAN]])
    found = drop_drifted_failures(now.requires_grad_(), rollout, mask, advantages=signs)
    assert found.tolist() == [[*kept, 0]] and not found.requires_grad


def test_a_drift_at_its_bound_is_kept() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    old, rollout = f64([[-1.5]]), f64([[-1.0]])
    minus = f64([[-1.0]])
    assert drop_drifted_failures(old, rollout, mask, advantages=minus, drift_max=0.5).item() == 1
    assert drop_drifted_failures(old, rollout, mask, advantages=minus, drift_max=0.49).item() == 0


@pytest.mark.parametrize(
    ("logs", "most", "kept"),
    [
        ([3.0, -2.0], 0.04, [0, 1, 0]),  # one token survives whatever it is
        ([0.5, -0.3, 0.1], 0.051, [0, 1, 1, 0]),  # (.01 + .09) / 2 = .05
        ([0.5, -0.3, 0.1], 0.049, [0, 0, 1, 0]),
        ([0.5, -0.5, 0.5], 0.2, [0, 0, 0, 0]),
        ([0.1, 0.6, -0.2], 0.137, [1, 1, 1, 0]),  # (.01 + .04 + .36) / 3 = .13667
        ([0.1, 0.6, -0.2], 0.136, [1, 0, 1, 0]),
    ],
)
def test_the_tokens_that_moved_farthest_go_first(
    logs: list[float], most: float, kept: list[int]
) -> None:
    old, rollout, mask = of(logs)
    found = CORRECTIONS["second_moment"](old, rollout, mask, second_moment_max=most)
    if sum(kept):
        assert found.tolist() == [kept]
    else:
        assert found.sum() == 1  # equal squares: one of them


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_refuse_tensors_of_different_shapes(name: str) -> None:
    old, rollout, mask = of([0.1, 0.2])
    further = {"advantages": old} if name == "drop_drifted_failures" else {}
    with pytest.raises(ValueError, match="has shape"):
        CORRECTIONS[name](old, rollout[:, :2], mask, **further)


# --- KL ---

DIFFERENCES = [-25.0, -19.0, -2.0, -0.3, 0.0, 0.3, 2.0, 9.0, 12.0, 25.0]


def bounded(d: float) -> float:
    return min(max(d, -20.0), 20.0)


def k3_of(d: float) -> float:
    return math.expm1(-d) + d


VALUES = {
    "reward_k1": bounded,
    "loss_k2": lambda d: bounded(d) ** 2 / 2,
    "loss_k3": lambda d: min(k3_of(bounded(d)), 10.0),
    "loss_k3_plus": lambda d: min(k3_of(bounded(d)), 10.0),
}
# Derivatives by the logprob; where a clamp acts there is none.
SLOPES = {
    "reward_k1": lambda d: 1.0 if abs(d) <= 20 else 0.0,
    "loss_k2": lambda d: d if abs(d) <= 20 else 0.0,
    "loss_k3": lambda d: 1 - math.exp(-d) if abs(d) <= 20 and k3_of(d) <= 10 else 0.0,
    "loss_k3_plus": lambda d: d if abs(d) <= 20 else 0.0,
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("d", DIFFERENCES)
def test_a_kl_estimator_far_out_and_near(name: str, d: float) -> None:
    logprobs = f64([[d - 30.0, 5.0]]).requires_grad_()
    reference = f64([[-30.0, NAN]])
    kl = KLS[name](logprobs, reference, torch.tensor([[True, False]]))
    assert kl[0].tolist() == pytest.approx([VALUES[name](d), 0.0], rel=1e-12)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert gradient[0].tolist() == pytest.approx([SLOPES[name](d), 0.0], rel=1e-12)


def test_k3_is_bounded_at_10_just_where_it_gets_there() -> None:
    """k3 = 9.9 and 10.1 at d = -2.6014 and -2.6185, found by hand with Newton's method."""
    for d in (-2.6014, -2.6185, 10.9, 11.1):
        kl = KLS["loss_k3"](f64([[d]]), f64([[0.0]]))
        exact = math.exp(-d) - 1 + d
        assert kl.item() == pytest.approx(min(exact, 10.0), rel=1e-9)


@pytest.mark.parametrize("log_r", [-25.0, -20.0, -1.0, 0.0, 0.7, 19.5, 20.0, 25.0])
@pytest.mark.parametrize("d", [-19.0, -3.0, -0.5, 0.0, 0.5, 3.0, 11.0])
def test_k3_under_its_ratio_has_the_value_r_k3_and_the_slope_r_d(d: float, log_r: float) -> None:
    now = -50.0
    logprobs = f64([[now, 1.0]]).requires_grad_()
    mask = torch.tensor([[True, False]])
    sampler = f64([[now - log_r, NAN]]).requires_grad_()
    kl = kl_k3_ratio(logprobs, f64([[now - d, NAN]]), mask, sampler)
    r = math.exp(bounded(log_r))
    assert kl[0].tolist() == pytest.approx([r * k3_of(d), 0.0], rel=1e-9)
    gradient, of_sampler = torch.autograd.grad(kl.sum(), [logprobs, sampler], allow_unused=True)
    assert of_sampler is None
    slope = r * d if abs(log_r) <= 20 else 0.0
    assert gradient[0].tolist() == pytest.approx([slope, 0.0], rel=1e-9)


@pytest.mark.parametrize("d", [-2.0, -0.5, 0.4, 3.0])
def test_slopes_of_the_kl_are_finite_differences_of_values(d: float) -> None:
    """k1, k2, k3 and r * k3 are what they are the derivative of; k3+ has the slope of k2."""
    step = 1e-6
    value = {**VALUES, "loss_k3_plus": VALUES["loss_k2"]}
    for name, of_d in value.items():
        logprobs = f64([[d - 30.0]]).requires_grad_()
        kl = KLS[name](logprobs, f64([[-30.0]]))
        (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
        difference = (of_d(d + step) - of_d(d - step)) / (2 * step)
        assert gradient.item() == pytest.approx(difference, rel=1e-6)
    logprobs = f64([[d - 30.0]]).requires_grad_()
    kl = kl_k3_ratio(logprobs, f64([[-30.0]]), None, f64([[-30.5]]))
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)

    def weighted(x: float) -> float:
        return math.exp(x + 0.5) * k3_of(x)

    difference = (weighted(d + step) - weighted(d - step)) / (2 * step)
    assert gradient.item() == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize("coeff", [0.1, 2.0])
def test_the_kl_comes_off_the_rewards_of_tokens_and_rows(coeff: float) -> None:
    mask = torch.tensor([[True, True, False], [False, True, False]])
    logprobs = f64([[-1.0, -2.0, NAN], [NAN, -1.0, NAN]])
    reference = f64([[-1.5, -1.0, NAN], [NAN, -26.0, NAN]])
    token_rewards = f64([[0.0, 0.5, 7.0], [3.0, 1.0, 0.0]])
    rewards, penalized = add_kl_to_rewards(
        f64([0.5, 1.0]), token_rewards, logprobs, reference, mask, kl_coeff=coeff
    )
    assert rewards.tolist() == pytest.approx([0.5 - coeff * (0.5 - 1.0), 1.0 - coeff * 20])
    expected = [[-coeff * 0.5, 0.5 + coeff, 7.0], [3.0, 1.0 - coeff * 20, 0.0]]
    for found, row in zip(penalized.tolist(), expected, strict=True):
        assert found == pytest.approx(row)
    attached = logprobs.clone().requires_grad_()
    for found in add_kl_to_rewards(
        f64([0.5, 1.0]), token_rewards, attached, reference, mask, kl_coeff=coeff
    ):
        assert not found.requires_grad
    single, _ = add_kl_to_rewards(
        torch.tensor([0.5, 1.0]), token_rewards, logprobs, reference, mask, kl_coeff=coeff
    )
    assert single.dtype == torch.float32
