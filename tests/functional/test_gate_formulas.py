"""Every gate on a grid of tokens against its formula in plain Python: value, gradient, metrics.

The grid has both signs of the advantage and none, ratios at 1, at every bound, and far beyond the
clamp of the log-ratio at 20. Nothing here calls what it proves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from oxrl.config.checks.algorithm import AT_RATIO_ONE
from oxrl.functional.gates import (
    Decision,
    clean,
    finish,
    gspo,
    importance_sampling,
    policy_gradient,
    ppo_clip,
)
from oxrl.functional.policy_losses import (
    GATES,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_topk_kl,
    dppo_topk_tv,
    dppo_tv,
    dro,
    drpo,
    fipo,
    gmpo,
    kl_cov,
    proximal,
    rgpo_like,
    rspo,
    sapo,
    simko,
    vespo,
)
from oxrl.functional.ratios import RATIOS, interpolated_anchor

NAN = float("nan")
FARTHEST = 20.0
LOG_RATIOS = [
    -25,
    -20.5,
    -19.5,
    -3,
    -0.7,
    -0.25,
    -0.1,
    0,
    0.1,
    0.2,
    0.3,
    0.7,
    1.2,
    3,
    19.5,
    20.5,
    25,
]
ADVANTAGES = [2.0, 1.0, 0.5, -0.5, -1.0, -1.5, 0.0]


class Token(NamedTuple):
    """What a formula says of one token."""

    value: float  # S
    slope: float  # dS / d logprob
    weight: float  # slope / A where A is not 0
    high: bool = False
    low: bool = False


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sign_of(a: float) -> int:
    return (a > 0) - (a < 0)


class Grid:
    """Every log-ratio with every advantage, a row each; the second column masked out."""

    def __init__(self) -> None:
        pairs = [(x, a) for a in ADVANTAGES for x in LOG_RATIOS]
        self.pairs = pairs
        count = len(pairs)
        self.now = [-0.05 - 0.03 * i for i in range(count)]
        self.old = [now - x for now, (x, _) in zip(self.now, pairs, strict=True)]
        self.weights = [0.1 + 0.01 * i for i in range(count)]
        self.corrections = [0.5 + 0.02 * i for i in range(count)]
        self.mask = torch.tensor([[True, False]] * count)

    def tensor(self, values: list[float]) -> Tensor:
        return f64([[value, NAN] for value in values])

    def run(
        self, gate: Callable[..., Any], **numbers: Any
    ) -> tuple[float, list[float], dict[str, Tensor]]:
        """Loss, gradient of every token, metrics; masked positions hold NaN."""
        logprobs = self.tensor(self.now).requires_grad_()
        loss, metrics = gate(
            logprobs,
            self.tensor(self.old),
            self.tensor([a for _, a in self.pairs]),
            self.mask,
            self.tensor(self.weights),
            correction=self.tensor(self.corrections),
            **numbers,
        )
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert not gradient[:, 1].any()
        return loss.item(), gradient[:, 0].tolist(), metrics


GRID = Grid()
SCALES = [w * c for w, c in zip(GRID.weights, GRID.corrections, strict=True)]


def compare(found: tuple[float, list[float], dict[str, Tensor]], expected: list[Token]) -> None:
    """Loss and gradients of all tokens, then what the metrics say of those with an advantage."""
    loss, gradient, metrics = found
    value = -sum(scale * token.value for scale, token in zip(SCALES, expected, strict=True))
    assert loss == pytest.approx(value, rel=1e-12)
    for (x, a), scale, token, slope in zip(GRID.pairs, SCALES, expected, gradient, strict=True):
        if token.slope == 0:
            assert slope == 0, (x, a)
        assert slope == pytest.approx(-scale * token.slope, rel=1e-11, abs=1e-300), (x, a)
    count = len(expected)
    live = [token.weight for (_, a), token in zip(GRID.pairs, expected, strict=True) if a]
    total = sum(live)
    wanted = {
        "update/clip_frac_high": sum(token.high for token in expected) / count,
        "update/clip_frac_low": sum(token.low for token in expected) / count,
        "update/weight_mean": total / len(live),
        "update/weight_max": max(live),
        "update/weight_zero_frac": sum(weight == 0 for weight in live) / len(live),
        "update/weight_ess": total**2 / (len(live) * sum(weight**2 for weight in live)),
    }
    for name, number in wanted.items():
        assert metrics[name].item() == pytest.approx(number, rel=1e-6), name


def bounded(x: float) -> float:
    return min(max(x, -FARTHEST), FARTHEST)


def on_grid(formula: Callable[[float, float, float, float], Token]) -> list[Token]:
    """The formula of (log ratio, advantage, current and old logprob) on every token of the grid."""
    values = zip(GRID.pairs, GRID.now, strict=True)
    return [formula(x, a, now, now - bounded(x)) for (x, a), now in values]


def test_the_plain_gradient_knows_no_ratio() -> None:
    expected = on_grid(lambda x, a, now, old: Token(a * now, a, 1.0))
    compare(GRID.run(policy_gradient), expected)


def ppo(
    x: float, a: float, low: float, high: float, dual: float = math.inf, live: bool = True
) -> Token:
    """min(r A, clip(r) A), bounded by dual * A where A < 0; no slope where it is constant."""
    r = math.exp(bounded(x))
    over = a > 0 and r > 1 + high
    under = a < 0 and r < 1 - low
    capped = a < 0 and r > dual
    if over:
        value = (1 + high) * a
    elif under:
        value = (1 - low) * a
    elif capped:
        value = dual * a
    else:
        value = r * a
    weight = 0.0 if over or under or capped or abs(x) > FARTHEST or not live else r
    return Token(value, weight * a, weight, over, under)


@pytest.mark.parametrize(
    ("low", "high", "dual"), [(0.2, 0.2, None), (0.1, 0.5, None), (0.3, 0.28, 3.0), (0.9, 4, 1.5)]
)
def test_ppo_is_the_clipped_surrogate(low: float, high: float, dual: float | None) -> None:
    cap = math.inf if dual is None else dual
    expected = on_grid(lambda x, a, now, old: ppo(x, a, low, high, cap))
    found = GRID.run(ppo_clip, clip_low=low, clip_high=high, clip_dual=dual)
    compare(found, expected)
    capped = sum(a < 0 and math.exp(bounded(x)) > cap for x, a in GRID.pairs)
    assert found[2]["update/clip_frac_dual"].item() == pytest.approx(capped / len(GRID.pairs))


@pytest.mark.parametrize("far", [25.0, -25.0])
@pytest.mark.parametrize(
    "name", ["ppo_clip", "sapo", "rgpo_like", "gmpo", "kl_cov", "clip_cov", "drpo", "fipo"]
)
def test_a_ratio_beyond_the_clamp_has_no_gradient(name: str, far: float) -> None:
    """At e^25 for A < 0, and at e^-25 for A > 0, no clip acts: what stops the gradient is that the
    clamped log-ratio is constant.
    """
    gates: dict[str, Callable[..., Any]] = {
        "ppo_clip": ppo_clip,
        "sapo": sapo,
        "rgpo_like": rgpo_like,
        "gmpo": gmpo,
        "kl_cov": kl_cov,
        "clip_cov": clip_cov,
        "drpo": drpo,
        "fipo": fipo,
    }
    further = {"selected": torch.tensor([[False]])} if name.endswith("_cov") else {}
    numbers = {"sapo_positive": 1e-9, "sapo_negative": 1e-9} if name == "sapo" else {}
    numbers = {"gate_sharpness": 1e-9} if name == "rgpo_like" else numbers
    logprobs = f64([[-30.0 + far]]).requires_grad_()
    ones = f64([[1.0]])
    loss, _ = gates[name](
        logprobs,
        f64([[-30.0]]),
        -math.copysign(1, far) * ones,
        ones.bool(),
        ones,
        **further,
        **numbers,
    )
    assert torch.autograd.grad(loss, logprobs)[0].item() == 0


@pytest.mark.parametrize(("least", "most"), [(0.0, 5.0), (0.8, 1.28), (0.5, 100.0)])
def test_cispo_weighs_every_token(least: float, most: float) -> None:
    """The fractions count tokens that have something to say: those with an advantage."""

    def formula(x: float, a: float, now: float, old: float) -> Token:
        r = math.exp(bounded(x))
        weight = min(max(r, least), most)
        return Token(
            weight * a * now, weight * a, weight, a != 0 and r > most, a != 0 and r < least
        )

    compare(GRID.run(cispo, weight_min=least, weight_max=most), on_grid(formula))


def sigmoid_gate(x: float, a: float, tau: float) -> Token:
    r = math.exp(bounded(x))
    exponent = -tau * (r - 1)
    sigma = 0.0 if exponent > 700 else 1 / (1 + math.exp(exponent))
    # 1 - sigma without cancellation
    other = 0.0 if exponent < -700 else 1 / (1 + math.exp(-exponent))
    weight = 0.0 if abs(x) > FARTHEST or other < 1e-16 else 4 * r * sigma * other
    return Token(4 / tau * sigma * a, weight * a, weight)


MODERATE = [x for x in LOG_RATIOS if x < 3 or x > FARTHEST]


@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (0.3, 2.0)])
def test_sapo_fades_by_the_sign_of_the_advantage(positive: float, negative: float) -> None:
    """Also at A = 0, where the sharpness changes nothing. Ratios so large that the sigmoid is 1 to
    the last digit are left to the test of the clamp.
    """
    loss, gradient, metrics = GRID.run(sapo, sapo_positive=positive, sapo_negative=negative)
    expected = on_grid(lambda x, a, now, old: sigmoid_gate(x, a, positive if a > 0 else negative))
    value = -sum(scale * token.value for scale, token in zip(SCALES, expected, strict=True))
    assert loss == pytest.approx(value, rel=1e-12)
    for (x, a), scale, token, slope in zip(GRID.pairs, SCALES, expected, gradient, strict=True):
        if x in MODERATE:
            assert slope == pytest.approx(-scale * token.slope, rel=1e-9, abs=1e-15), (x, a)
    assert metrics["update/clip_frac_high"] == metrics["update/clip_frac_low"] == 0


@pytest.mark.parametrize("sharpness", [1.0, 0.4, 3.0])
def test_the_gate_like_rgpo_has_one_sharpness_for_both_signs(sharpness: float) -> None:
    both = {"sapo_positive": sharpness, "sapo_negative": sharpness}
    expected = on_grid(lambda x, a, now, old: sigmoid_gate(x, a, sharpness))
    for gate, numbers in ((rgpo_like, {"gate_sharpness": sharpness}), (sapo, both)):
        loss, gradient, _ = GRID.run(gate, **numbers)
        value = -sum(scale * token.value for scale, token in zip(SCALES, expected, strict=True))
        assert loss == pytest.approx(value, rel=1e-12)
        for (x, _), scale, token, slope in zip(GRID.pairs, SCALES, expected, gradient, strict=True):
            if x in MODERATE:
                assert slope == pytest.approx(-scale * token.slope, rel=1e-9, abs=1e-15)


def divergence_gate(
    x: float, a: float, now: float, distance: float, low: float, high: float, most: float
) -> Token:
    over = a > 0 and x > 0 and distance > high
    under = a < 0 and x < 0 and distance > low
    weight = 0.0 if over or under else min(math.exp(bounded(x)), most)
    return Token(weight * a * now, weight * a, weight, over, under)


@pytest.mark.parametrize(
    ("low", "high", "most"), [(0.2, 0.2, 20.0), (0.05, 0.3, 1.5), (0.0, 0.01, 3)]
)
def test_dppo_by_total_variation(low: float, high: float, most: float) -> None:
    def distance(now: float, old: float) -> float:
        return abs(math.exp(now) - math.exp(old))

    found = GRID.run(dppo_tv, dppo_low=low, dppo_high=high, weight_max=most)
    compare(
        found,
        on_grid(
            lambda x, a, now, old: divergence_gate(x, a, now, distance(now, old), low, high, most)
        ),
    )
    distances = [
        distance(now, now - bounded(x)) for (x, _), now in zip(GRID.pairs, GRID.now, strict=True)
    ]
    mean = sum(distances) / len(distances)
    assert found[2]["update/divergence"].item() == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("coeff", [0.0, 0.3, 1.0, 4.0])
def test_dro_pulls_every_token_by_its_own_log_ratio(coeff: float) -> None:
    """However far the token is: nothing here takes an exponential."""

    def formula(x: float, a: float, now: float, old: float) -> Token:
        slope = a - coeff * x
        return Token(a * now - coeff / 2 * x**2, slope, slope / a if a else 0.0)

    compare(GRID.run(dro, proximal_coeff=coeff), on_grid(formula))


@pytest.mark.parametrize(
    ("delta", "spo"), [(0.15, False), (0.02, False), (1.0, False), (0.2, True), (1.0, True)]
)
def test_drpo_is_the_ratio_with_a_square_of_what_was_moved(delta: float, spo: bool) -> None:
    def moved(now: float, old: float) -> float:
        r = math.exp(now - old)
        return r - 1 if spo else math.exp(now) - math.exp(old)

    def formula(x: float, a: float, now: float, old: float) -> Token:
        r = math.exp(bounded(x))
        trust = 1.0 if spo else math.exp(old)
        value = r * a - abs(a) * trust * (r - 1) ** 2 / (2 * delta)
        favored = sign_of(a) * moved(now, old)
        weight = 0.0 if abs(x) > FARTHEST else r * (1 - favored / delta)
        return Token(
            value, weight * a, weight, a > 0 and favored > delta, a < 0 and favored > delta
        )

    found = GRID.run(drpo, drpo_delta=delta, spo=spo)
    compare(found, on_grid(formula))
    pairs = zip(GRID.pairs, GRID.now, strict=True)
    distances = [abs(moved(now, now - bounded(x))) for (x, _), now in pairs]
    mean = sum(distances) / len(distances)
    assert found[2]["update/divergence"].item() == pytest.approx(mean, rel=1e-9)


def test_drpo_pulls_back_beyond_its_bound_alone() -> None:
    """At the bound itself the weight is 0 and nothing is pulled back."""
    for step in (0.5, -0.5):
        logprobs, old = f64([[-1.0 + step]]).requires_grad_(), f64([[-1.0]])
        ones = f64([[1.0]])
        bound = abs(float((logprobs.detach() - old).exp()) - 1)
        for delta, pulled in ((bound, 0.0), (bound * 0.99, 1.0)):
            given = (logprobs, old, math.copysign(1, step) * ones, ones.bool(), ones)
            loss, metrics = drpo(*given, drpo_delta=delta, spo=True)
            name = "update/clip_frac_high" if step > 0 else "update/clip_frac_low"
            assert metrics[name].item() == pulled
            (slope,) = torch.autograd.grad(loss, logprobs)
            assert (slope.item() == 0) == (pulled == 0)


@pytest.mark.parametrize(
    ("most", "safe", "dual"), [(0.2, 4.0, None), (0.9, 1.25, None), (0.5, 2.5, 1.5), (0.0, 2, None)]
)
def test_fipo_is_ppo_times_the_influence_of_what_follows(
    most: float, safe: float, dual: float | None
) -> None:
    """Rows of one token: nothing follows but the token itself."""
    influences: list[float] = []

    def formula(x: float, a: float, now: float, old: float) -> Token:
        plain = ppo(x, a, 0.2, 0.3, math.inf if dual is None else dual)
        r = math.exp(bounded(x))
        raised = 1.0 if dual is not None and r > dual else r
        influence = min(max(raised, 1.0), 1 + most)
        if a < 0 and r > safe:
            influence = 1.0
        influences.append(influence)
        weight = influence * plain.weight
        return Token(influence * plain.value, weight * a, weight, plain.high, plain.low)

    numbers = {"clip_low": 0.2, "clip_high": 0.3, "clip_dual": dual}
    found = GRID.run(fipo, influence_range=most, influence_ratio_max=safe, **numbers)
    compare(found, on_grid(formula))
    mean = sum(influences) / len(influences)
    assert found[2]["update/influence"].item() == pytest.approx(mean, rel=1e-9)
    assert "update/clip_frac_dual" in found[2]


def test_a_ratio_at_the_bound_is_still_enlarged() -> None:
    logprobs = f64([[-1.0]]).requires_grad_()
    old, ones = f64([[-2.0]]), f64([[1.0]])
    bound = float((logprobs.detach() - old).exp())
    for most, expected in ((bound, 1.2 * bound), (bound * 0.999, bound)):
        loss, _ = fipo(logprobs, old, -ones, ones.bool(), ones, influence_ratio_max=most)
        (slope,) = torch.autograd.grad(loss, logprobs)
        assert slope.item() == pytest.approx(expected, rel=1e-12)


def test_a_ratio_at_the_dual_clip_has_influence() -> None:
    logprobs = f64([[-1.0]]).requires_grad_()
    old, ones = f64([[-2.0]]), f64([[1.0]])
    bound = float((logprobs.detach() - old).exp())
    for dual, influence in ((bound, bound), (bound * 0.999, 1.0)):
        given = (logprobs, old, ones, ones.bool(), ones)
        _, metrics = fipo(*given, clip_dual=dual, influence_range=9.0)
        assert metrics["update/influence"].item() == pytest.approx(influence, rel=1e-12)


def slopes_of(gate: Callable[..., Any], now: Tensor, old: Tensor, **numbers: Any) -> Tensor:
    """dS / d logprobs of a row with advantages of both signs and none."""
    logprobs = now.clone().requires_grad_()
    advantages = f64([[1.5, -2.0, 0.0]])
    mask = torch.ones_like(advantages, dtype=torch.bool)
    loss, _ = gate(logprobs, old, advantages, mask, mask.double(), **numbers)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return -gradient


@pytest.mark.parametrize(("name", "other"), AT_RATIO_ONE.items())
def test_where_the_ratio_is_one_a_gate_is_the_one_that_its_refusal_names(
    name: str, other: str
) -> None:
    now = f64([[-0.2, -1.0, -3.0]])
    assert torch.equal(slopes_of(GATES[name], now, now), slopes_of(GATES[other], now, now))
    old = now - f64([[0.1, -0.2, 0.3]])
    assert not torch.allclose(slopes_of(GATES[name], now, old), slopes_of(GATES[other], now, old))


@pytest.mark.parametrize("spo", [False, True])
def test_without_a_bound_drpo_is_the_plain_ratio(spo: bool) -> None:
    now = f64([[-0.2, -1.0, -3.0]])
    old = now - f64([[0.1, -0.2, 2.0]])
    free = slopes_of(drpo, now, old, drpo_delta=1e15, spo=spo)
    assert torch.allclose(free, slopes_of(importance_sampling, now, old), rtol=1e-12, atol=0)


@pytest.mark.parametrize("gate", [dro, drpo, fipo, proximal])
def test_nothing_flows_back_to_the_policy_before(gate: Callable[..., Any]) -> None:
    now, old = f64([[-1.0, -0.5]]).requires_grad_(), f64([[-1.1, -0.4]]).requires_grad_()
    advantages = f64([[1.0, -2.0]]).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = gate(now, old, advantages, mask, mask.double())
    given = torch.autograd.grad(loss, [now, old, advantages], allow_unused=True)
    assert given[0].all() and given[1:] == (None, None)


def test_influence_fades_over_positions_and_passes_over_what_is_not_trained() -> None:
    """log r = .1, (a tool's token), .2, -.4 with a half-life of one position: F = .1 + .2 / 4 - .4 / 8,
    then .2 - .4 / 2 and -.4.
    """
    old = f64([[-1.0, NAN, -2.0, -1.5]])
    logprobs = (old + f64([[0.1, 0.0, 0.2, -0.4]])).requires_grad_()
    mask = torch.tensor([[True, False, True, True]])
    ones = torch.ones(1, 4, dtype=torch.float64)
    loss, _ = fipo(
        logprobs, old, ones, mask, ones, clip_high=9.0, influence_range=1.0, influence_half_life=1.0
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = [math.exp(0.1) * math.exp(0.1), 0.0, math.exp(0.2), math.exp(-0.4)]
    assert gradient[0].tolist() == pytest.approx([-weight for weight in expected], rel=1e-12)


# (probability when sampled, now): both directions, both sides of 1/2, and next to 1.
PROBABILITIES = [
    (0.01, 0.03),
    (0.03, 0.01),
    (0.5, 0.75),
    (0.75, 0.5),
    (0.99, 0.7),
    (0.7, 0.99),
    (0.2, 0.2),
    (0.9, 0.05),
    (0.05, 0.9),
]


def binary_kl(mu: float, p: float) -> float:
    """KL(sampler || current) of {sampled token, all others}."""
    return mu * math.log(mu / p) + (1 - mu) * math.log((1 - mu) / (1 - p))


@pytest.mark.parametrize("a", [1.5, -2.0, 0.0])
@pytest.mark.parametrize(("mu", "p"), PROBABILITIES)
def test_dppo_by_kl_measures_from_the_sampler_to_the_policy(mu: float, p: float, a: float) -> None:
    """The bound lies just below and just above the divergence of this direction."""
    distance = binary_kl(mu, p)
    for factor in (0.99, 1.01):
        bound = distance * factor + 1e-9 * (factor - 1)
        # The bound of the other side is far, so that a mix-up of the two shows.
        for low, high in ((bound, 100.0), (100.0, bound)):
            logprobs = f64([[math.log(p)]]).requires_grad_()
            ones = f64([[1.0]])
            loss, metrics = dppo_kl(
                logprobs,
                f64([[math.log(mu)]]),
                a * ones,
                ones.bool(),
                ones,
                dppo_low=low,
                dppo_high=high,
                weight_max=2.5,
            )
            dropped = (a > 0 and p > mu and distance > high) or (
                a < 0 and p < mu and distance > low
            )
            weight = 0.0 if dropped else min(p / mu, 2.5)
            (gradient,) = torch.autograd.grad(loss, logprobs)
            assert gradient.item() == pytest.approx(-a * weight, rel=1e-12)
            assert loss.item() == pytest.approx(-a * weight * math.log(p), rel=1e-12)
            assert metrics["update/divergence"].item() == pytest.approx(distance, abs=1e-12)


def test_dppo_stays_finite_where_a_probability_is_one() -> None:
    """The others' probability counts as 1e-8 there: K from 1 to 1/2 is log 2, back it is
    1/2 log(1/2) + 1/2 log((1/2) / 1e-8).
    """
    ones = f64([[1.0]])
    for now, old, expected in (
        (0.5, 1.0, math.log(2) + 1e-8 * math.log(1e-8 / 0.5)),
        (1.0, 0.5, 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-8)),
    ):
        _, metrics = dppo_kl(f64([[now]]).log(), f64([[old]]).log(), ones, ones.bool(), ones)
        assert metrics["update/divergence"].item() == pytest.approx(expected, rel=1e-12)


def vespo_weight(x: float, a: float) -> float:
    k, l = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    log_w = min(max(x, math.log(1e-8)), FARTHEST)
    exponent = l + k * log_w - l * math.exp(log_w)
    return math.exp(exponent) if exponent > -745 else 0.0


def test_vespo_fades_on_either_side_of_one() -> None:
    compare(
        GRID.run(vespo),
        on_grid(
            lambda x, a, now, old: Token(
                vespo_weight(x, a) * a * now, vespo_weight(x, a) * a, vespo_weight(x, a)
            )
        ),
    )


@pytest.mark.parametrize("a", [1.0, -1.0])
def test_the_floor_of_vespos_product_is_1e_8(a: float) -> None:
    """At e^-25 the weight is that of W = 1e-8: e^l 1e-8^k e^(-l 1e-8), neither of e^-25 nor 0."""
    logprobs = f64([[-25.0]]).requires_grad_()
    ones = f64([[1.0]])
    loss, _ = vespo(logprobs, f64([[0.0]]), a * ones, ones.bool(), ones)
    weight = -torch.autograd.grad(loss, logprobs)[0].item() / a
    k, l = (2, 3) if a > 0 else (3, 2)
    assert weight == pytest.approx(math.exp(l) * 1e-8**k * math.exp(-l * 1e-8), rel=1e-9)


@pytest.mark.parametrize("coeff", [1e-3, 0.5, 2.0])
def test_the_quadratic_pull(coeff: float) -> None:
    """Nothing is clamped: a token 25 nats away is pulled as 25 nats are."""

    def formula(x: float, a: float, now: float, old: float) -> Token:
        slope = a - coeff * x
        return Token(a * now - coeff / 2 * x * x, slope, slope / a if a else 0.0)

    loss, gradient, metrics = GRID.run(proximal, proximal_coeff=coeff)
    expected = on_grid(formula)
    value = -sum(scale * token.value for scale, token in zip(SCALES, expected, strict=True))
    assert loss == pytest.approx(value, rel=1e-12)
    for scale, token, slope in zip(SCALES, expected, gradient, strict=True):
        assert slope == pytest.approx(-scale * token.slope, rel=1e-9, abs=1e-13)
    live = [token.weight for (_, a), token in zip(GRID.pairs, expected, strict=True) if a]
    assert metrics["update/weight_mean"].item() == pytest.approx(sum(live) / len(live))
    assert metrics["update/weight_max"].item() == pytest.approx(max(live))


@pytest.mark.parametrize("a", [1.3, -0.7, 0.0])
def test_the_pull_is_that_of_the_whole_response(a: float) -> None:
    """Log-ratios .5, -.2, .4 of one row: X = .7 for each of its tokens."""
    row, now = [0.5, -0.2, 0.4], [-1.0, -0.4, -2.0]
    logprobs = f64([[*now, NAN], [-1.0, NAN, NAN, NAN]]).requires_grad_()
    old = [[n - x for n, x in zip(now, row, strict=True)] + [NAN], [-1.3, NAN, NAN, NAN]]
    mask = torch.tensor([[True] * 3 + [False], [True] + [False] * 3])
    ones = torch.ones(2, 4, dtype=torch.float64)
    loss, _ = proximal(logprobs, f64(old), a * ones, mask, ones, proximal_coeff=0.6)
    value = a * (sum(now) - 1.0) - 0.3 * (0.7**2 + 0.3**2)
    assert loss.item() == pytest.approx(-value)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[0].tolist() == pytest.approx([-(a - 0.6 * 0.7)] * 3 + [0.0])
    assert gradient[1].tolist() == pytest.approx([-(a - 0.6 * 0.3)] + [0.0] * 3)


def test_the_unclipped_ratio() -> None:
    def formula(x: float, a: float, now: float, old: float) -> Token:
        r = math.exp(bounded(x))
        weight = r if abs(x) <= FARTHEST else 0.0
        return Token(r * a, weight * a, weight)

    compare(GRID.run(importance_sampling), on_grid(formula))


@pytest.mark.parametrize("a", [1.3, -0.7, 0.0])
@pytest.mark.parametrize(
    "row", [[0.5, -0.2, 0.3], [25.0, -24.9, 0.2], [0.1, -0.1, 0.003], [-0.4, 0.1, 0.0], [65, 0, 0]]
)
def test_gspo_takes_and_clips_a_row_as_a_whole(row: list[float], a: float) -> None:
    """The mean decides, and it alone: a token 25 nats away keeps its gradient where the others
    make up for it; a mean beyond 20 has none.
    """
    mean = sum(row) / 3
    token = ppo(mean, a, 0.1, 0.2)
    now = [-70.0, -1.0, -0.5]
    logprobs = f64([[*now, NAN]]).requires_grad_()
    old = f64([[n - x for n, x in zip(now, row, strict=True)] + [NAN]])
    mask = torch.tensor([[True, True, True, False]])
    weights = f64([[0.2, 0.3, 0.5, NAN]])
    advantages = f64([[a] * 3 + [NAN]])
    loss, metrics = gspo(logprobs, old, advantages, mask, weights, clip_low=0.1, clip_high=0.2)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(-token.value, rel=1e-9)
    expected = [-w * token.slope for w in (0.2, 0.3, 0.5)]
    assert gradient[0].tolist() == pytest.approx([*expected, 0.0], rel=1e-9)
    assert metrics["update/clip_frac_high"] == token.high
    assert metrics["update/clip_frac_low"] == token.low


@pytest.mark.parametrize("level", ["none", "token", "sequence", "geometric"])
def test_an_anchor_gives_every_token_the_ratio_of_its_level(level: str) -> None:
    rows = [[0.5, -0.2, 0.3], [0.4, -0.7]]
    now = f64([[-1.0, -2.0, -3.0], [-0.5, -1.5, NAN]]).requires_grad_()
    log_ratios = f64([rows[0], [*rows[1], NAN]])
    old = (now.detach() - log_ratios).requires_grad_()
    mask = torch.tensor([[True] * 3, [True, True, False]])
    anchor = RATIOS[level](now, old, mask)
    assert not anchor.requires_grad
    expected = {
        "none": [[0.0] * 3, [0.0] * 2],
        "token": rows,
        "sequence": [[0.6] * 3, [-0.3] * 2],
        "geometric": [[0.2] * 3, [-0.15] * 2],
    }[level]
    found = (now.detach() - anchor)[mask].tolist()
    assert found == pytest.approx([*expected[0], *expected[1]])


def test_the_interpolated_anchor_moves_to_the_policy_with_age() -> None:
    """alpha 0, 0, 1/2, 2/3, 3/4 for ages 0 to 4."""
    now = f64([[-1.0] * 5 + [NAN]]).requires_grad_()
    rollout = f64([[-2.0, -3.0, -2.0, -4.0, -1.0, NAN]])
    ages = torch.tensor([[0, 1, 2, 3, 4, 2]])
    mask = torch.tensor([[True] * 5 + [False]])
    found = interpolated_anchor(now, rollout, ages, mask)
    assert found[0].tolist() == pytest.approx([-2.0, -3.0, -1.5, -2.0, -1.0, 0.0])
    assert not found.requires_grad


# --- the top candidates of DPPO ---

# Probabilities of the top two and of the sampled token, when sampled and now.
BUCKETS = [
    # the sampled token is the first of the top two
    ([0.5, 0.3], 0.5, [0.7, 0.1], 0.7, True),
    ([0.5, 0.3], 0.5, [0.2, 0.6], 0.2, True),
    # it is not among them
    ([0.5, 0.3], 0.1, [0.4, 0.3], 0.25, False),
    ([0.5, 0.3], 0.15, [0.55, 0.4], 0.02, False),
    # nothing is left for the rest
    ([0.6, 0.4], 0.6, [0.5, 0.5], 0.5, True),
    ([0.5, 0.3], 0.2, [0.4, 0.35], 0.25, False),
    # rounding has made them more than 1: less than nothing is left for nobody
    ([0.7, 0.4], 0.7, [0.5, 0.2], 0.5, True),
    ([0.5, 0.2], 0.5, [0.7, 0.4], 0.7, True),
]


def buckets(top: list[float], own: float, among: bool) -> list[float]:
    known = [*top, 0.0 if among else own]
    return [*known, max(1 - sum(known), 0.0)]


@pytest.mark.parametrize("a", [1.5, -2.0])
@pytest.mark.parametrize(("mu_top", "mu", "p_top", "p", "among"), BUCKETS)
def test_dppo_over_the_top_candidates(
    mu_top: list[float], mu: float, p_top: list[float], p: float, among: bool, a: float
) -> None:
    """Bounds just below and just above the distance, which runs from the sampler to the policy."""
    before, after = buckets(mu_top, mu, among), buckets(p_top, p, among)
    moved = sum(abs(x - y) for x, y in zip(before, after, strict=True)) / 2
    tiny = 1e-8
    kl = sum(m * math.log(max(m, tiny) / max(q, tiny)) for m, q in zip(before, after, strict=True))
    for gate, distance in ((dppo_topk_tv, moved), (dppo_topk_kl, kl)):
        for factor in (0.99, 1.01):
            for low, high in ((distance * factor, 100.0), (100.0, distance * factor)):
                logprobs = f64([[math.log(p), NAN]]).requires_grad_()
                top = f64([[[math.log(x) for x in p_top], [NAN, NAN]]]).requires_grad_()
                loss, metrics = gate(
                    logprobs,
                    f64([[math.log(mu), NAN]]),
                    f64([[a, NAN]]),
                    torch.tensor([[True, False]]),
                    f64([[1.0, NAN]]),
                    top_logprobs=top,
                    old_top_logprobs=f64([[[math.log(x) for x in mu_top], [NAN, NAN]]]),
                    sampled_in_top=torch.tensor([[among, False]]),
                    dppo_low=low,
                    dppo_high=high,
                    weight_max=2.2,
                )
                dropped = distance > (high if a > 0 else low) and (p > mu) == (a > 0)
                weight = 0.0 if dropped else min(p / mu, 2.2)
                gradients = torch.autograd.grad(loss, [logprobs, top], allow_unused=True)
                assert gradients[0] is not None and gradients[1] is None
                assert gradients[0][0].tolist() == pytest.approx([-a * weight, 0.0], rel=1e-12)
                found = metrics["update/divergence"].item()
                assert found == pytest.approx(distance, rel=1e-9, abs=1e-9)


def test_a_candidate_that_became_impossible_counts_as_1e_8() -> None:
    ones = f64([[1.0]])
    further = {
        "top_logprobs": f64([[[math.log(0.5), -40.0]]]),
        "old_top_logprobs": f64([[[math.log(0.5), math.log(0.3)]]]),
        "sampled_in_top": torch.tensor([[True]]),
    }
    half = f64([[math.log(0.5)]])
    _, metrics = dppo_topk_kl(half, half, ones, ones.bool(), ones, **further)
    expected = 0.3 * math.log(0.3 / 1e-8) + 0.2 * math.log(0.2 / 0.5)
    assert metrics["update/divergence"].item() == pytest.approx(expected, rel=1e-9)
    swapped = {**further, "top_logprobs": further["old_top_logprobs"]}
    swapped["old_top_logprobs"] = further["top_logprobs"]
    _, metrics = dppo_topk_kl(half, half, ones, ones.bool(), ones, **swapped)
    assert metrics["update/divergence"].item() == pytest.approx(0.5 * math.log(0.5 / 0.2), rel=1e-9)


# --- exactly at a bound nothing is clipped ---


def at_one(gate: Callable[..., Any], a: float, **numbers: Any) -> tuple[float, dict[str, Tensor]]:
    """Weight and metrics of a token whose ratio is exactly 1."""
    logprobs = f64([[-1.0]]).requires_grad_()
    ones = f64([[1.0]])
    loss, metrics = gate(logprobs, f64([[-1.0]]), a * ones, ones.bool(), ones, **numbers)
    return -torch.autograd.grad(loss, logprobs)[0].item() / a, metrics


@pytest.mark.parametrize("a", [1.0, -1.0])
@pytest.mark.parametrize(
    ("gate", "numbers"),
    [
        (ppo_clip, {"clip_low": 0.0, "clip_high": 0.0, "clip_dual": 1.0}),
        (cispo, {"weight_min": 1.0, "weight_max": 1.0}),
        (gmpo, {"clip_low": 0.0, "clip_high": 0.0}),
        (dppo_tv, {"dppo_low": 0.0, "dppo_high": 0.0}),
    ],
)
def test_a_token_at_its_bound_is_not_clipped(
    gate: Callable[..., Any], numbers: dict[str, float], a: float
) -> None:
    weight, metrics = at_one(gate, a, **numbers)
    assert weight == 1.0
    assert metrics["update/clip_frac_high"] == metrics["update/clip_frac_low"] == 0


@pytest.mark.parametrize("a", [1.0, -1.0])
def test_a_divergence_at_its_bound_is_kept(a: float) -> None:
    """From 1/4 to 1/2 and back: the change of probability is exactly 1/4."""
    old, now = (0.25, 0.5) if a > 0 else (0.5, 0.25)
    ones = f64([[1.0]])
    logprobs = f64([[math.log(now)]]).requires_grad_()
    loss, metrics = dppo_tv(
        logprobs,
        f64([[math.log(old)]]),
        a * ones,
        ones.bool(),
        ones,
        dppo_low=0.25,
        dppo_high=0.25,
    )
    assert metrics["update/divergence"].item() == 0.25
    assert torch.autograd.grad(loss, logprobs)[0].item() == pytest.approx(-a * now / old)


# --- what every gate has in common ---


def test_the_gradient_is_the_weight_times_the_advantage_whatever_else_is_attached() -> None:
    logprobs = f64([[-1.0, -2.0]]).requires_grad_()
    tokens = clean(logprobs, f64([[-1.5, -1.0]]), f64([[2.0, -3.0]]), torch.ones(1, 2).bool())
    attached = [tokens.log_ratio, tokens.ratio, tokens.advantages, tokens.now, tokens.old]
    assert not any(x.requires_grad for x in attached)
    value = logprobs * 5  # as a careless gate might leave it
    decision = Decision(value, f64([[0.5, 0.25]]), further={"update/mine": logprobs * 1.0})
    loss, metrics = finish(tokens, decision, f64([[1.0, 1.0]]), None)
    assert loss.item() == 15.0
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [[-1.0, 0.75]]
    assert metrics["update/mine"] == -1.5 and not metrics["update/mine"].requires_grad


@pytest.mark.parametrize("gate", [clip_cov, kl_cov, rspo, dppo_topk_tv, proximal])
def test_no_gradient_flows_into_what_is_not_the_policy(gate: Callable[..., Any]) -> None:
    leaves = {
        name: f64([[x]]).requires_grad_()
        for name, x in (("old", -1.1), ("advantages", 1.0), ("weights", 1.0), ("correction", 1.0))
    }
    further: dict[str, Tensor] = {}
    if gate is rspo:
        further = {"router_shift": f64([[0.9]]).requires_grad_()}
    elif gate is dppo_topk_tv:
        further = {
            "top_logprobs": f64([[[-1.0, -2.0]]]).requires_grad_(),
            "old_top_logprobs": f64([[[-1.0, -2.0]]]).requires_grad_(),
            "sampled_in_top": torch.tensor([[True]]),
        }
    elif gate is not proximal:
        further = {"selected": torch.tensor([[True]])}
    logprobs = f64([[-1.0]]).requires_grad_()
    loss, metrics = gate(
        logprobs,
        leaves["old"],
        leaves["advantages"],
        torch.tensor([[True]]),
        leaves["weights"].detach(),
        correction=leaves["correction"],
        **further,
    )
    loss.backward()
    others = [leaves["old"], leaves["advantages"], leaves["correction"], *further.values()]
    assert all(x.grad is None for x in others)
    assert not any(metric.requires_grad for metric in metrics.values())


def test_the_effective_sample_size_of_one_small_weight_is_one() -> None:
    ones = f64([[1.0]])
    _, metrics = ppo_clip(f64([[-0.7]]), 0 * ones, ones, ones.bool(), ones)
    assert metrics["update/weight_ess"].item() == pytest.approx(1.0)
    assert metrics["update/weight_max"].item() == pytest.approx(math.exp(-0.7))


def rows_of_gmpo(
    log_ratios: list[float], a: float, low: float, high: float
) -> tuple[float, list[bool]]:
    """M of a row, and which of its tokens were clipped."""
    kept = []
    clipped = []
    for x in log_ratios:
        near = bounded(x)
        over = a > 0 and near > high
        under = a < 0 and near < -low
        kept.append(high if over else -low if under else near)
        clipped.append(over or under)
    return math.exp(sum(kept) / len(kept)), clipped


@pytest.mark.parametrize("gamma", [None, [1.0, 0.8, 0.95, 0.9]])
@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.15, 0.6), (0.6, 0.15)])
@pytest.mark.parametrize("a", [1.3, -0.7, 0.0])
def test_gmpo_and_rspo_are_geometric_means_of_clipped_ratios(
    a: float, low: float, high: float, gamma: list[float] | None
) -> None:
    row = [0.5, -0.5, 0.2, -0.2]
    scaled = [x + math.log(g) for x, g in zip(row, gamma or [1.0] * 4, strict=True)]
    mean, clipped = rows_of_gmpo(scaled, a, low, high)
    now = [-1.0, -0.4, -0.9, -2.0]
    logprobs = f64([[*now, NAN]]).requires_grad_()
    old = f64([[n - x for n, x in zip(now, row, strict=True)] + [NAN]])
    mask = torch.tensor([[True] * 4 + [False]])
    weights = f64([[0.1, 0.2, 0.3, 0.4, NAN]])
    further: dict[str, Any] = {}
    gate: Callable[..., Any] = gmpo
    if gamma is not None:
        gate = rspo
        further["router_shift"] = f64([[*gamma, NAN]])
    loss, metrics = gate(
        logprobs,
        old,
        f64([[a] * 4 + [NAN]]),
        mask,
        weights,
        clip_low=low,
        clip_high=high,
        **further,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(-mean * a, abs=1e-12)
    expected = [
        -w * a * (0.0 if cut else mean)
        for w, cut in zip([0.1, 0.2, 0.3, 0.4], clipped, strict=True)
    ]
    assert gradient[0].tolist() == pytest.approx([*expected, 0.0], abs=1e-12)
    over = sum(clipped) / 4
    assert metrics["update/clip_frac_high"] == (over if a > 0 else 0)
    assert metrics["update/clip_frac_low"] == (over if a < 0 else 0)


@pytest.mark.parametrize("a", [2.0, -1.5, 0.0])
def test_chosen_tokens_leave_clip_cov_and_are_pulled_back_in_kl_cov(a: float) -> None:
    for x in LOG_RATIOS:
        for chosen in (True, False):
            flag = torch.tensor([[chosen]])
            ones = f64([[1.0]])
            logprobs = f64([[-30.0 + x]]).requires_grad_()
            old = f64([[-30.0]])
            inside = abs(x) <= FARTHEST
            loss, metrics = clip_cov(
                logprobs,
                old,
                a * ones,
                ones.bool(),
                ones,
                selected=flag,
                clip_low=0.1,
                clip_high=0.3,
            )
            token = ppo(x, a, 0.1, 0.3)
            kept = 0.0 if chosen else 1.0
            assert loss.item() == pytest.approx(-kept * token.value, rel=1e-12)
            slope = torch.autograd.grad(loss, logprobs)[0].item()
            assert slope == pytest.approx(-kept * token.slope, rel=1e-9, abs=1e-300)
            assert metrics["update/selected_frac"] == float(chosen)
            assert metrics["update/clip_frac_high"] == token.high
            loss, metrics = kl_cov(
                logprobs, old, a * ones, ones.bool(), ones, selected=flag, kl_cov_coeff=0.7
            )
            pull = 0.7 if chosen else 0.0
            r = math.exp(bounded(x))
            value = r * a - pull * abs(bounded(x))
            assert loss.item() == pytest.approx(-value, rel=1e-12)
            slope = torch.autograd.grad(loss, logprobs)[0].item()
            # The pull has a direction however far the token is: the source bounds no |log r|.
            expected = (r * a if inside else 0.0) - pull * sign_of(round(x, 9))
            assert slope == pytest.approx(-expected, rel=1e-9, abs=1e-12), (x, chosen)
            assert metrics["update/selected_frac"] == float(chosen)


@pytest.mark.parametrize("a", [2.0, -1.5, 0.0])
@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("is_top", [True, False])
@pytest.mark.parametrize("x", [-0.7, -0.1, 0.0, 0.1, 0.5])
def test_simko_shares_what_is_right_and_pushes_down_what_was_sure(
    x: float, is_top: bool, explore: bool, a: float
) -> None:
    alpha, boost = 0.3, 1.7
    logprobs = f64([[-1.0 + x, NAN]]).requires_grad_()
    top = f64([[[-1.0, -1.5, -2.5], [NAN, NAN, NAN]]]).requires_grad_()
    ones = f64([[1.0, 1.0]])
    loss, metrics = simko(
        logprobs,
        f64([[-1.0, NAN]]),
        a * ones,
        torch.tensor([[True, False]]),
        ones / 2,
        top_logprobs=top,
        old_top_logprobs=f64([[[-1.1, -1.4, -2.6], [NAN] * 3]]),
        explore=torch.tensor([[explore, True]]),
        sampled_is_top=torch.tensor([[is_top, True]]),
        clip_low=0.2,
        clip_high=0.3,
        simko_alpha=alpha,
        simko_boost=boost,
    )
    boosted = explore and is_top and a < 0
    token = ppo(x, boost * a if boosted else a, 0.2, 0.3)
    share = alpha if explore and a > 0 else 0.0
    own, others = torch.autograd.grad(loss, [logprobs, top])
    assert loss.item() == pytest.approx(-token.value / 2, rel=1e-12)
    assert own[0].tolist() == pytest.approx([-(1 - share) * token.slope / 2, 0.0], rel=1e-12)
    each = -share / 3 * token.slope / 2
    assert others.flatten().tolist() == pytest.approx([each] * 3 + [0.0] * 3, rel=1e-12)
    treated = boosted or (explore and a > 0)
    assert metrics["update/simko_frac"] == float(treated)
    assert metrics["update/clip_frac_high"] == token.high
    assert metrics["update/clip_frac_low"] == token.low


def test_padding_alone_leaves_the_metrics_at_zero() -> None:
    """A batch of no token, and one without a single position."""
    for shape in ((2, 3), (0, 0)):
        zeros = torch.zeros(shape, dtype=torch.float64)
        logprobs = zeros.clone().requires_grad_()
        loss, metrics = ppo_clip(logprobs, zeros, zeros, zeros.bool(), zeros)
        assert loss == 0 and loss.requires_grad
        assert {float(value) for value in metrics.values()} == {0.0}
