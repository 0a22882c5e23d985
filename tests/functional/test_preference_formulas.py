"""Preference losses at other numbers than their defaults, on both sides of every bend: value, and
gradient against finite differences of the formula in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional import preference_losses as losses
from oxrl.functional.preference_pairs import bounded_exp, log1mexp, read_pairs, weighted_loss
from oxrl.functional.preference_statistics import (
    bco_reward_shift,
    beta_dpo_beta,
    beta_dpo_selection,
    dr_dpo_log_mean,
    rank_match,
    standardize,
    wpo_weights,
)

NAN = float("nan")
# (u, v): log ratios of chosen and rejected, in every quadrant, at 0, and far out.
RATIOS = [(0.5, -0.5), (-0.4, 0.3), (0.7, 0.2), (-0.2, -0.9), (3.0, -4.0), (-5.0, 6.0), (0.3, 0.0)]
OWN = (-6.0, -8.0)  # summed log-probabilities of 3 and 4 tokens


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


# method -> sets of numbers, and its formula of (u, v, numbers) on completions of OWN.
FORMULAS: dict[
    str, tuple[list[dict[str, float]], Callable[[float, float, dict[str, float]], float]]
] = {
    "dpo": (
        [{"beta": 0.1}, {"beta": 1.3}],
        lambda u, v, n: -log_sigmoid(n["beta"] * (u - v)),
    ),
    "bpo": (
        [{"beta": 0.5, "balance": 0.5}, {"beta": 0.5, "balance": 2.0}, {"beta": 1, "balance": 1}],
        lambda u, v, n: -log_sigmoid(n["beta"] * min(u, -n["balance"] * v)),
    ),
    "dpop": (
        [{"beta": 0.3, "penalty_coeff": 2.0}, {"beta": 1.0, "penalty_coeff": 0.5}],
        lambda u, v, n: -log_sigmoid(n["beta"] * (u - v - n["penalty_coeff"] * max(0, -u))),
    ),
    "dpo_shift": (
        [{"beta": 0.3, "rejected_scale": 0.4}],
        lambda u, v, n: -log_sigmoid(n["beta"] * (u - n["rejected_scale"] * v)),
    ),
    "minor_dpo": (
        [{"beta": 0.7}],
        lambda u, v, n: -log_sigmoid(n["beta"] * (u - max(0, v))),
    ),
    "c2_dpo": (
        [{"beta": 0.7, "mass_coeff": 0.3}],
        lambda u, v, n: -log_sigmoid(n["beta"] * (u - v)) + n["mass_coeff"] * (u + v) ** 2,
    ),
    "rpo": (
        [{"beta": 0.7, "nll_coeff": 0.3}],
        lambda u, v, n: -log_sigmoid(n["beta"] * (u - v)),  # the likelihood is added below
    ),
    "cdpo": (
        [{"beta": 0.7, "label_noise": 0.3}],
        lambda u, v, n: (
            -(1 - n["label_noise"]) * log_sigmoid(n["beta"] * (u - v))
            - n["label_noise"] * log_sigmoid(-n["beta"] * (u - v))
        ),
    ),
    "robust_dpo": (
        [{"beta": 0.7, "label_noise": 0.3}],
        lambda u, v, n: (
            (
                -(1 - n["label_noise"]) * log_sigmoid(n["beta"] * (u - v))
                + n["label_noise"] * log_sigmoid(-n["beta"] * (u - v))
            )
            / (1 - 2 * n["label_noise"])
        ),
    ),
    "exo": (
        [{"beta": 0.7, "label_noise": 0.3}, {"beta": 0.4, "label_noise": 0.9}],
        lambda u, v, n: (
            sigmoid(n["beta"] * (u - v))
            * (log_sigmoid(n["beta"] * (u - v)) - math.log(1 - n["label_noise"]))
            + sigmoid(-n["beta"] * (u - v))
            * (log_sigmoid(-n["beta"] * (u - v)) - math.log(n["label_noise"]))
        ),
    ),
    "hinge": (
        [{"beta": 0.7}, {"beta": 0.1}],
        lambda u, v, n: max(0.0, 1 - n["beta"] * (u - v)),
    ),
    "gpo_squared_hinge": (
        [{"beta": 0.7}, {"beta": 0.1}],
        lambda u, v, n: max(0.0, 1 - n["beta"] * (u - v)) ** 2,
    ),
    "gpo_exponential": ([{"beta": 0.7}], lambda u, v, n: math.exp(-n["beta"] * (u - v))),
    "gpo_savage": ([{"beta": 0.7}], lambda u, v, n: sigmoid(-n["beta"] * (u - v)) ** 2),
    "sppo": (
        [{"beta": 0.7}],
        lambda u, v, n: (u - 0.5 / n["beta"]) ** 2 + (v + 0.5 / n["beta"]) ** 2,
    ),
    "cal_dpo": (
        [{"beta": 0.7, "calibration_coeff": 0.3}, {"beta": 0.2, "calibration_coeff": 2.0}],
        lambda u, v, n: (
            -log_sigmoid(u - v)
            + n["calibration_coeff"] * ((u - 0.5 / n["beta"]) ** 2 + (v + 0.5 / n["beta"]) ** 2)
        ),
    ),
    "nca": (
        [{"beta": 0.7}],
        lambda u, v, n: (
            -log_sigmoid(n["beta"] * u)
            - log_sigmoid(-n["beta"] * u) / 2
            - log_sigmoid(-n["beta"] * v) / 2
        ),
    ),
    "apo_zero": (
        [{"beta": 0.7}],
        lambda u, v, n: 1 - sigmoid(n["beta"] * u) + sigmoid(n["beta"] * v),
    ),
    "apo_down": (
        [{"beta": 0.7}],
        lambda u, v, n: sigmoid(n["beta"] * u) + 1 - sigmoid(n["beta"] * (u - v)),
    ),
    "f_dpo_forward_kl": (
        [{"beta": 0.2}],
        lambda u, v, n: -log_sigmoid(n["beta"] * (math.exp(-v) - math.exp(-u))),
    ),
    "f_dpo_jensen_shannon": (
        [{"beta": 0.7}],
        lambda u, v, n: -log_sigmoid(n["beta"] * (log_sigmoid(u) - log_sigmoid(v))),
    ),
    "f_dpo_alpha": (
        [{"beta": 0.2, "alpha": 0.3}, {"beta": 0.2, "alpha": 1.5}],
        lambda u, v, n: (
            -log_sigmoid(
                n["beta"]
                * (math.exp((n["alpha"] - 1) * u) - math.exp((n["alpha"] - 1) * v))
                / (n["alpha"] - 1)
            )
        ),
    ),
    "chi_po": (
        [{"beta": 0.05}],
        lambda u, v, n: -log_sigmoid(n["beta"] * (u - v + math.exp(u) - math.exp(v))),
    ),
}


def anchor(name: str, chosen: float, numbers: dict[str, float]) -> float:
    """What a loss adds of the chosen completion's own likelihood, 3 tokens long."""
    return -numbers["nll_coeff"] * chosen / 3 if name == "rpo" else 0.0


def pair(u: float, v: float) -> tuple[Tensor, ...]:
    """The seven tensors of one pair with these log ratios."""
    return tuple(f64([x]) for x in (*OWN, OWN[0] - u, OWN[1] - v, 3, 4, 1))


@pytest.mark.parametrize(("u", "v"), RATIOS)
@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_slopes_are_those_of_the_formula(name: str, u: float, v: float) -> None:
    """Slopes by central differences, and by one-sided ones' mean at no bend: RATIOS avoids them."""
    cases, formula = FORMULAS[name]
    step = 1e-6
    for numbers in cases:
        chosen, rejected, *others = pair(u, v)
        chosen.requires_grad_()
        rejected.requires_grad_()
        loss, metrics = losses.PAIR_LOSSES[name](chosen, rejected, *others, **numbers)
        expected = formula(u, v, numbers) + anchor(name, OWN[0], numbers)
        assert loss.item() == pytest.approx(expected, rel=1e-10)
        found = torch.autograd.grad(loss, [chosen, rejected])
        by_u = (formula(u + step, v, numbers) - formula(u - step, v, numbers)) / (2 * step)
        by_v = (formula(u, v + step, numbers) - formula(u, v - step, numbers)) / (2 * step)
        by_u += anchor(name, 1.0, numbers)
        if not (name == "minor_dpo" and v == 0):
            assert found[1].item() == pytest.approx(by_v, rel=1e-5, abs=1e-8), numbers
        assert found[0].item() == pytest.approx(by_u, rel=1e-5, abs=1e-8), numbers
        beta = numbers["beta"]
        assert metrics["preference/margin"].item() == pytest.approx(beta * (u - v))
        assert metrics["preference/chosen_reward"].item() == pytest.approx(beta * u)
        assert metrics["preference/rejected_reward"].item() == pytest.approx(beta * v)
        assert metrics["preference/accuracy"].item() == float(u > v)


@pytest.mark.parametrize("gamma", [0.0, 0.05, 2.0])
@pytest.mark.parametrize(("u", "v"), RATIOS)
def test_the_focus_of_focal_po_carries_no_gradient(u: float, v: float, gamma: float) -> None:
    """-w log sigmoid(x) with w = sigmoid(x)^gamma held: the slope by x is -w sigmoid(-x), where an
    attached w would add -gamma w sigmoid(-x) log sigmoid(x).
    """
    chosen, *others = pair(u, v)
    loss, _ = losses.focal_po(chosen.requires_grad_(), *others, beta=0.7, gamma=gamma)
    x = 0.7 * (u - v)
    weight = sigmoid(x) ** gamma
    assert loss.item() == pytest.approx(-weight * log_sigmoid(x), rel=1e-10)
    slope = torch.autograd.grad(loss, chosen)[0].item()
    assert slope == pytest.approx(-0.7 * weight * sigmoid(-x), rel=1e-10)


@pytest.mark.parametrize("beta", [0.1, 0.8])
@pytest.mark.parametrize("robustness", [0.5, 1.0, 3.0])
def test_dr_dpo_has_the_value_and_the_gradient_of_its_log_mean(
    robustness: float, beta: float
) -> None:
    count = len(RATIOS)
    own = [-log_sigmoid(beta * (u - v)) for u, v in RATIOS]
    mean = sum(math.exp(-l / robustness) for l in own) / count
    columns = [
        f64(column)
        for column in zip(*[[float(x) for x in pair(u, v)] for u, v in RATIOS], strict=True)
    ]
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    for scale in (1.0, 5.0):
        # Only the shares of the weights matter to the mean.
        found = dr_dpo_log_mean(f64(own), scale * weights, robustness=robustness)
        assert found.item() == pytest.approx(math.log(mean), rel=1e-10)
    chosen = columns[0].requires_grad_()
    loss, _ = losses.dr_dpo(
        chosen, *columns[1:6], weights, f64(math.log(mean)), beta=beta, robustness=robustness
    )
    assert loss.item() == pytest.approx(-robustness * math.log(mean), rel=1e-10)
    (gradient,) = torch.autograd.grad(loss, chosen)
    for (u, v), l, slope in zip(RATIOS, own, gradient.tolist(), strict=True):
        share = math.exp(-l / robustness) / mean / count
        assert slope == pytest.approx(-share * beta * sigmoid(-beta * (u - v)), rel=1e-9)


def test_pairs_left_out_do_not_count_in_the_log_mean() -> None:
    found = dr_dpo_log_mean(f64([1.0, NAN, 2.0]), f64([0.2, 0.0, 0.6]), robustness=2.0)
    expected = 0.25 * math.exp(-0.5) + 0.75 * math.exp(-1.0)
    assert found.item() == pytest.approx(math.log(expected))


@pytest.mark.parametrize("noise", [-0.5, 0.5, 0.7])
def test_label_noise_of_robust_dpo_lies_below_a_half(noise: float) -> None:
    with pytest.raises(ValueError, match="must be in \\[0, 0.5\\)"):
        losses.robust_dpo(*pair(0.5, 0.1), label_noise=noise)


@pytest.mark.parametrize("noise", [0.0, -0.5, 1.0, 1.5])
def test_label_noise_of_exo_lies_inside_0_and_1(noise: float) -> None:
    with pytest.raises(ValueError, match="must be in \\(0, 1\\)"):
        losses.exo(*pair(0.5, 0.1), label_noise=noise)


@pytest.mark.parametrize(
    ("u", "v"), [(25.0, 1.0), (1.0, 25.0), (-25.0, 1.0), (1.0, -25.0), (19.5, 19.2), (-20.0, -19.7)]
)
def test_the_exponents_of_chi_po_are_bounded_at_20(u: float, v: float) -> None:
    """Beyond it the exponential is constant, and the slope is that of the log ratio alone."""
    chosen, rejected, *others = pair(u, v)
    beta = 1e-9
    loss, _ = losses.chi_po(chosen.requires_grad_(), rejected.requires_grad_(), *others, beta=beta)
    near_u, near_v = min(u, 20), min(v, 20)
    x = beta * (u - v + math.exp(near_u) - math.exp(near_v))
    assert loss.item() == pytest.approx(-log_sigmoid(x), rel=1e-12)
    slopes = torch.autograd.grad(loss, [chosen, rejected])
    by_u = 1 + (math.exp(u) if u <= 20 else 0)
    by_v = 1 + (math.exp(v) if v <= 20 else 0)
    assert slopes[0].item() == pytest.approx(-beta * sigmoid(-x) * by_u, rel=1e-9)
    assert slopes[1].item() == pytest.approx(beta * sigmoid(-x) * by_v, rel=1e-9)


def test_the_exponents_of_chi_po_have_no_floor() -> None:
    """exp(-20.5) is 1e-9: seen at a beta at which it moves the loss."""
    for u, v in ((-19.9, -30.0), (-30.0, -19.9), (-20.5, -19.5), (-19.5, -20.5)):
        loss, _ = losses.chi_po(*pair(u, v), beta=1.0)
        plain = -log_sigmoid(u - v)
        moved = -sigmoid(v - u) * (math.exp(u) - math.exp(v))
        assert loss.item() - plain == pytest.approx(moved, rel=1e-3), (u, v)


@pytest.mark.parametrize("x", [-100.0, 0.0, 79.5, 80.5, 100.0])
def test_exponentials_are_bounded_at_80(x: float) -> None:
    leaf = f64([x]).requires_grad_()
    found = bounded_exp(leaf)
    assert found.item() == pytest.approx(math.exp(min(x, 80.0)))
    (slope,) = torch.autograd.grad(found.sum(), leaf)
    assert slope.item() == pytest.approx(math.exp(x) if x <= 80 else 0.0)


@pytest.mark.parametrize("x", [-1e-6, -0.3, -math.log(2), -0.8, -1.5, -20.0])
def test_the_logarithm_of_the_rest(x: float) -> None:
    assert log1mexp(f64(x)).item() == pytest.approx(math.log(-math.expm1(x)), rel=1e-12)


# --- pairs ---


def test_a_completion_of_no_token_counts_as_one_token_long() -> None:
    pairs = read_pairs(*(f64([x]) for x in (-2.0, -3.0, -1.0, -1.5, 0, 0, 1)))
    assert pairs.mean_chosen.item() == -2.0 and pairs.mean_rejected.item() == -3.0
    assert pairs.mean_margin.item() == -1.0 + 1.5
    longer = read_pairs(*(f64([x]) for x in (-2.0, -3.0, -1.0, -1.5, 2, 3, 1)))
    assert longer.mean_chosen.item() == -1.0 and longer.mean_rejected.item() == -1.0
    single = read_pairs(*(f64([x]) for x in (-2.0, -3.0, -1.0, -1.5, 1, 1, 1)))
    assert single.mean_chosen.item() == -2.0 and single.mean_rejected.item() == -3.0


def metrics_of(
    *columns: list[float] | None, weights: list[float], beta: float | None = None
) -> dict[str, float]:
    pairs = read_pairs(
        *(None if column is None else f64(column) for column in columns), f64(weights)
    )
    zeros = torch.zeros(len(weights), dtype=torch.float64)
    _, found = (
        pairs.loss_and_metrics(zeros) if beta is None else pairs.loss_and_metrics(zeros, beta)
    )
    return {name.removeprefix("preference/"): float(value) for name, value in found.items()}


def test_metrics_of_pairs_with_and_without_a_reference() -> None:
    """Three pairs of which the last is left out; the second is a tie."""
    chosen, rejected = [-1.0, -2.0, NAN], [-3.0, -2.0, NAN]
    weights = [0.5, 0.5, 0.0]
    found = metrics_of(chosen, rejected, None, None, None, None, weights=weights)
    assert found == pytest.approx(
        {
            "margin": 1.0,
            "chosen_reward": -1.5,
            "rejected_reward": -2.5,
            "accuracy": 0.5,  # a tie is not the right order
            "chosen_logprobs": -1.5,
            "rejected_logprobs": -2.5,
        }
    )
    reference = [-2.0, -1.0, NAN]
    found = metrics_of(
        chosen,
        rejected,
        reference,
        [-1.0, -4.0, NAN],
        [2, 4, 1],
        [1, 1, 1],
        weights=weights,
        beta=0.5,
    )
    # u = 1, -1; v = -2, 2
    assert found == pytest.approx(
        {
            "margin": 0.5 * (3 - 3) / 2,
            "chosen_reward": 0.0,
            "rejected_reward": 0.0,
            "accuracy": 0.5,
            "chosen_logprobs": -1.5,
            "rejected_logprobs": -2.5,
            "chosen_nll": (0.5 + 0.5) / 2,
        }
    )
    half = metrics_of(chosen, rejected, reference, None, None, None, weights=weights)
    assert half["chosen_reward"] == -1.5 and half["rejected_reward"] == -2.5


def test_what_has_no_weight_gives_nothing_and_a_negative_weight_counts() -> None:
    x = f64([1.0, NAN, 3.0, 5.0]).requires_grad_()
    loss = weighted_loss(x, f64([0.5, 0.0, -1.0, 1.0]))
    assert loss.item() == 0.5 - 3.0 + 5.0
    assert torch.autograd.grad(loss, x)[0].tolist() == [0.5, 0.0, -1.0, 1.0]


# --- single completions ---


@pytest.mark.parametrize("attached", [False, True])
def test_losses_of_single_completions_and_their_metrics(attached: bool) -> None:
    """Five rows of which two have no weight; weights of 1 and -1 count as any other."""
    logprobs = f64([-1.0, -2.0, NAN, -4.0, NAN]).requires_grad_()
    reference = f64([-1.5, -1.0, NAN, -4.5, NAN]).requires_grad_(attached)
    desirable = torch.tensor([True, False, True, False, False])
    weights = f64([1.0, 0.5, 0.0, -1.0, 0.0])
    r = [0.5, -1.0, 0.0, 0.5]
    numbers = {"beta": 0.8, "desirable_coeff": 1.2, "undesirable_coeff": 0.7}
    loss, metrics = losses.kto(logprobs, reference, desirable, weights, f64(0.3), **numbers)
    terms = [
        1.2 * sigmoid(0.8 * (0.3 - r[0])),
        0.5 * 0.7 * sigmoid(0.8 * (r[1] - 0.3)),
        -0.7 * sigmoid(0.8 * (r[3] - 0.3)),
    ]
    assert loss.item() == pytest.approx(sum(terms))
    loss.backward()
    assert reference.grad is None and logprobs.grad is not None
    s = [sigmoid(0.8 * (x - 0.3)) for x in r]
    slopes = [-1.2 * 0.8 * s[0] * (1 - s[0]), 0.28 * s[1] * (1 - s[1]), 0.0]
    slopes += [-0.7 * 0.8 * s[3] * (1 - s[3]), 0.0]
    assert logprobs.grad.tolist() == pytest.approx(slopes)
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(
        {
            "preference/baseline": 0.8 * 0.3,
            "preference/desirable_reward": 0.8 * 0.5,
            "preference/undesirable_reward": 0.8 * (-1.0 + 0.5) / 2,
        }
    )
    assert not any(metric.requires_grad for metric in metrics.values())
    loss, metrics = losses.bco_unpaired(logprobs, reference, desirable, weights, f64(0.2), beta=0.8)
    terms = [
        -log_sigmoid(0.4 - 0.2),
        -0.5 * log_sigmoid(0.2 + 0.8),
        log_sigmoid(0.2 - 0.4),
    ]
    assert loss.item() == pytest.approx(sum(terms))
    assert float(metrics["preference/baseline"]) == pytest.approx(0.2)


# --- statistics ---


def test_the_weights_of_wpo() -> None:
    """exp of the mean over the tokens of log p - log sum p^2; 1 for a row without a token."""
    logprobs = f64([[-1.0, -2.0, NAN], [-0.5, NAN, NAN], [NAN] * 3])
    squares = f64([[0.5, 0.25, NAN], [0.8, NAN, NAN], [NAN] * 3])
    mask = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    first = (-1.0 - math.log(0.5) - 2.0 - math.log(0.25)) / 2
    expected = [math.exp(first), math.exp(-0.5 - math.log(0.8)), 1.0]
    assert wpo_weights(logprobs, squares, mask).tolist() == pytest.approx(expected)


def test_equal_values_keep_their_order_in_rank_matching() -> None:
    values = f64([1.0, 0.0] * 40)
    others = f64([float(i) for i in range(80)])
    found = rank_match(values, others).tolist()
    # The zeros, at odd places, take the 40 smallest in their order; then the ones.
    assert found[1::2] == [float(i) for i in range(40)]
    assert found[0::2] == [float(i) for i in range(40, 80)]


@pytest.mark.parametrize(
    ("mean", "std", "drop"), [(0.2, 0.5, 0.4), (-1.0, 2.0, 0.7), (0.0, 0.0, 0.5)]
)
def test_the_pairs_that_beta_dpo_keeps(mean: float, std: float, drop: float) -> None:
    """Gumbel top-k: the largest of log p - log(-log noise)."""
    margins = [0.1, -0.7, 1.5, 0.3, -2.0, 0.9, 0.2, 4.0, -0.1, 0.6]
    noise = [0.3, 0.99, 0.8, 0.02, 0.5, 0.6, 0.1, 0.97, 0.4, 0.7]
    scores = [
        -((m - mean) ** 2) / max(std, 1e-6) ** 2 / 2 - math.log(-math.log(x))
        for m, x in zip(margins, noise, strict=True)
    ]
    count = max(1, round((1 - drop) * 10))
    best = sorted(range(10), key=lambda i: -scores[i])[:count]
    found = beta_dpo_selection(f64(margins), f64(noise), mean=mean, std=std, drop=drop)
    assert found.nonzero().flatten().tolist() == sorted(best)
    single = beta_dpo_selection(f64(margins), f64(noise), mean=mean, std=std, drop=1.0)
    assert single.sum() == 1


def test_standardizing_survives_a_deviation_of_zero() -> None:
    assert standardize(f64([1.0, 3.0]), mean=2.0, std=0.5).tolist() == [-2.0, 2.0]
    assert standardize(f64([2.0, 2.5]), mean=2.0, std=0.0).tolist() == pytest.approx([0.0, 5e5])


def test_running_statistics_of_rewards_and_margins() -> None:
    shift, count = bco_reward_shift(f64([[1.0, 2.0], [4.0, 5.0]]), mean=0.5, count=6)
    assert shift.item() == pytest.approx((12 + 3) / 10) and count == 10
    raised = beta_dpo_beta(f64([1.0, 3.0]), mean=1.5, beta=0.2, scale=0.6)
    assert raised.item() == pytest.approx(0.2 * (1 + 0.6 * 0.5))
    assert beta_dpo_beta(f64([-9.0]), mean=1.0, beta=0.2, scale=0.6).item() == 1e-3
