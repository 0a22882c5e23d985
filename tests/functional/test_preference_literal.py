"""Every preference, reward-model, value and supervised loss against a second implementation, written
from its source in decimals (`oxrl_proofs.literal_preferences`): values and gradients, at several
parameters, with margins of both signs, far out, ties and lengths that differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional.preference_losses import PAIR_LOSSES, SINGLE_LOSSES
from oxrl.functional.preference_statistics import dr_dpo_log_mean, rank_match
from oxrl.functional.reward_model_losses import bradley_terry, process_reward
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.functional.value_losses import value_loss
from oxrl.functional.weights import token_mean
from oxrl.tables.preference import METHODS
from oxrl_proofs import literal_preferences as literal

# Of the whole batch, and compared below.
OF_BATCH = {"aot_unpaired", "dr_dpo"}
VALUES: dict[str, tuple[float, ...]] = {
    "beta": (0.01, 0.1, 2.5),
    "label_noise": (0.001, 0.1, 0.45),
    "tau": (0.05, 1.0),
    "calibration_coeff": (0.0, 1.0, 3.0),
    "alpha": (0.25, 0.5, 0.9),
    "gamma": (0.0, 0.05, 1.4),
    "length_coeff": (0.0, 0.01, 0.5),
    "penalty_coeff": (0.0, 5.0, 50.0),
    "rejected_scale": (0.5, 0.95, 1.0),
    "balance": (0.5, 1.0, 2.0),
    "mass_coeff": (0.0, 1e-3, 0.3),
    "nll_coeff": (0.0, 0.005, 1.0),
    "odds_coeff": (0.0, 0.1, 1.0),
    "robustness": (0.5, 1.0, 10.0),
    "desirable_coeff": (0.5, 1.0, 2.0),
    "undesirable_coeff": (0.5, 1.0, 2.0),
}
# (log-ratio of the chosen, of the rejected): both signs, ties, and far out.
LOG_RATIOS = [
    (0.5, -0.5), (-0.5, 0.5), (2.0, 1.5), (-1.5, -2.0), (-3.0, 7.0), (0.7, 0.7), (0.0, 0.0),
    (-0.7, -0.7), (15.0, -12.0), (-12.0, 15.0), (60.0, 45.0), (-45.0, -60.0), (70.0, -70.0),
    (-70.0, 70.0), (300.0, -250.0), (-250.0, 300.0),
]  # fmt: skip
LENGTHS = [(3, 4), (1, 9), (7, 2), (5, 5)]
# Where an exponential of the source is bounded so that it stays finite: log-ratios up to there.
BOUNDED = {
    "chi_po": 20.0,
    "gpo_exponential": 15.0,
    "discopop": 15.0,
    "f_dpo_forward_kl": 75.0,
    "f_dpo_alpha": 75.0,
}


def is_kink(name: str, pair: literal.Pair, numbers: dict[str, float]) -> bool:
    """Whether the derivative is a choice there."""
    u, v = float(pair.u), float(pair.v)
    distance = {
        "dpop": u,
        "minor_dpo": v,
        "bpo": u + numbers.get("balance", 1.0) * v,
        "hinge": 1 - numbers.get("beta", 0.0) * (u - v),
    }
    return abs(distance.get(name, 1.0)) < 1e-6


def numbers_of(name: str) -> Iterator[dict[str, float]]:
    """The defaults, and every number moved by itself."""
    methods = [method for method in METHODS.values() if method.loss == name]
    defaults = dict(methods[0].numbers) if methods else {}
    yield defaults
    for number in defaults:
        for value in VALUES[number]:
            yield defaults | {number: value}


def pairs_of(name: str) -> list[literal.Pair]:
    found: list[literal.Pair] = []
    extras = itertools.cycle((0.4, -1.3, 0.0, 2.0))
    for index, (u, v) in enumerate(LOG_RATIOS):
        if max(abs(u), abs(v)) > BOUNDED.get(name, 1e9):
            continue
        nw, nl = LENGTHS[index % len(LENGTHS)]
        # Means of -0.2 to -3 per token.
        w = -nw * (0.2 + 0.35 * (index % 9))
        l = -nl * (0.3 + 0.4 * (index % 7))
        reads = METHODS[name].extras if name in METHODS else ()
        extra = tuple(
            abs(next(extras)) if name in ("wpo", "beta_dpo") else next(extras) for _ in reads
        )
        # Exactly the floats that the tensors hold.
        fields = [Decimal(x) for x in (w, l, w - u, l - v, nw, nl)]
        found.append(literal.Pair(*fields, extras=tuple(Decimal(x) for x in extra)))
    return found


def tensors_of(pairs: list[literal.Pair]) -> list[Tensor]:
    columns = ("w", "l", "rw", "rl", "nw", "nl")
    found = [
        torch.tensor([float(getattr(pair, name)) for pair in pairs], dtype=torch.float64)
        for name in columns
    ]
    return [*found, torch.full((len(pairs),), 1.0, dtype=torch.float64)]


def decimals(numbers: dict[str, float]) -> dict[str, Decimal]:
    return {name: Decimal(value) for name, value in numbers.items()}


def close(found: float, expected: Decimal, what: object) -> None:
    assert found == pytest.approx(float(expected), rel=2e-9, abs=1e-11), what


def test_every_loss_of_a_pair_has_a_second_implementation() -> None:
    assert set(literal.LITERAL) | OF_BATCH == set(PAIR_LOSSES)


@pytest.mark.parametrize("name", literal.LITERAL)
def test_a_loss_and_its_gradient_are_the_source_s(name: str) -> None:
    pairs = pairs_of(name)
    for numbers in numbers_of(name):
        chosen, rejected, *rest = tensors_of(pairs)
        chosen.requires_grad_()
        rejected.requires_grad_()
        for index, pair in enumerate(pairs):
            # One pair at a time, so that its own loss is seen and not a sum.
            one = [tensor[index : index + 1] for tensor in (chosen, rejected, *rest)]
            extras = [torch.tensor([float(extra)], dtype=torch.float64) for extra in pair.extras]
            if name in ("bco", "beta_dpo"):
                extras = [extra.squeeze() for extra in extras]
            loss, _ = PAIR_LOSSES[name](*one, *extras, **numbers)
            slopes = torch.autograd.grad(loss, (chosen, rejected), allow_unused=True)
            found = [0.0 if slope is None else float(slope[index]) for slope in slopes]
            value, by_w, by_l = literal.value_and_slopes(name, pair, decimals(numbers))
            close(float(loss.detach()), value, (name, numbers, pair))
            if not is_kink(name, pair, numbers):
                close(found[0], by_w, ("by chosen", name, numbers, pair))
                close(found[1], by_l, ("by rejected", name, numbers, pair))


@pytest.mark.parametrize("name", sorted(OF_BATCH))
def test_a_loss_of_a_whole_batch_and_its_gradient_are_the_source_s(name: str) -> None:
    # Distinct log-ratios: at a tie the ranks are a choice.
    pairs = [pair for pair in pairs_of("dpo") if pair.u != pair.v][:9]
    for numbers in numbers_of(name):
        chosen, rejected, *rest = tensors_of(pairs)
        rest[-1] = rest[-1] / len(pairs)
        u, v = chosen - rest[0], rejected - rest[1]
        if name == "dr_dpo":
            each = -torch.nn.functional.logsigmoid(numbers["beta"] * (u - v))
            robustness = numbers["robustness"]
            extras: tuple[Any, ...] = (dr_dpo_log_mean(each, rest[-1], robustness=robustness),)
        else:
            extras = (rank_match(u, v), rank_match(v, u))
        chosen.requires_grad_()
        rejected.requires_grad_()
        loss, _ = PAIR_LOSSES[name](chosen, rejected, *rest, *extras, **numbers)
        by_w, by_l = torch.autograd.grad(loss, (chosen, rejected))
        of_batch = {"aot_unpaired": literal.aot_unpaired, "dr_dpo": literal.dr_dpo}[name]
        value, slopes_w, slopes_l = literal.slopes_of_batch(of_batch, pairs, decimals(numbers))
        close(float(loss.detach()), value, (name, numbers))
        for index in range(len(pairs)):
            close(float(by_w[index]), slopes_w[index], (name, numbers, index))
            close(float(by_l[index]), slopes_l[index], (name, numbers, index))


@pytest.mark.parametrize("name", sorted(SINGLE_LOSSES))
def test_a_loss_of_single_completions_is_the_source_s(name: str) -> None:
    log_ratios = [0.5, -0.5, 0.0, 3.0, -7.0, 60.0, -60.0]
    one = torch.ones(1, dtype=torch.float64)
    for numbers in numbers_of(name):
        exact = decimals(numbers)
        for log_ratio, shift, desirable in itertools.product(
            log_ratios, (0.0, 0.4, 5.0), (True, False)
        ):
            own = (-2 * one + log_ratio).requires_grad_()
            verdict = torch.tensor([desirable])
            level = torch.tensor(shift, dtype=torch.float64)
            loss, _ = SINGLE_LOSSES[name](own, -2 * one, verdict, one, level, **numbers)
            (slope,) = torch.autograd.grad(loss, own)
            second = {"kto": literal.kto, "bco_unpaired": literal.bco_single}[name]
            with localcontext(literal.DIGITS):
                x, z, step = Decimal(log_ratio), Decimal(shift), literal.STEP
                moved = [second(x + h, z, desirable, exact) for h in (step, -step)]
                value, expected = second(x, z, desirable, exact), (moved[0] - moved[1]) / 2 / step
            close(float(loss.detach()), value, (name, numbers, log_ratio, shift, desirable))
            close(float(slope), expected, (name, numbers, log_ratio, shift, desirable))


def test_reward_model_losses_are_the_source_s() -> None:
    one = torch.ones(1, dtype=torch.float64)
    for s_w, s_l, margin, center in itertools.product(
        (-40.0, -1.0, 0.0, 2.0, 40.0), (-40.0, 0.0, 2.0), (0.0, 0.3, 3.0), (0.0, 0.01, 1.0)
    ):
        given = [Decimal(x) for x in (s_w, s_l, margin, center)]
        with localcontext(literal.DIGITS):
            expected = literal.bradley_terry(*given)
        loss, _ = bradley_terry(s_w * one, s_l * one, one, margin * one, center_coeff=center)
        close(float(loss), expected, given)
    for score, label in itertools.product((-50.0, -1.0, 0.0, 2.0, 50.0), (0.0, 0.3, 1.0)):
        with localcontext(literal.DIGITS):
            expected = literal.process_reward(Decimal(score), Decimal(label))
        loss, _ = process_reward(score * one[None], label * one[None], one[None])
        close(float(loss), expected, (score, label))


def test_value_and_supervised_losses_are_the_source_s() -> None:
    one, kept = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    grid = (-3.0, -0.2, 0.0, 0.1, 0.2, 0.5, 4.0)
    for value, old, target, clip in itertools.product(grid, (0.0, 0.3), grid, (None, 0.2, 1.0)):
        exact = (Decimal(value), Decimal(old), Decimal(target))
        with localcontext(literal.DIGITS):
            expected = literal.value_loss(*exact, None if clip is None else Decimal(clip))
        loss, _ = value_loss(value * one, old * one, target * one, kept, one, value_clip=clip)
        close(float(loss), expected, (value, old, target, clip))
    rows = [[-0.5, -3.0, -0.01], [-60.0]]
    mask = torch.tensor([[True, True, True], [False, True, False]])
    logprobs = torch.tensor([rows[0], [0.0, *rows[1], 0.0]], dtype=torch.float64)
    loss, _ = supervised_loss(logprobs, mask, token_mean(mask).double())
    expected = literal.supervised([Decimal(x) for row in rows for x in row])
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_the_optimum_of_r_dpo_is_the_policy_that_its_penalized_reward_asks_for() -> None:
    """Five responses with rewards, lengths and a reference. The policy that maximizes
    E[r - alpha |y|] - beta KL(pi, ref) is ref exp((r - alpha |y|) / beta) / Z. R-DPO in expectation
    over every pair, preferred as Bradley-Terry says of r, is stationary there, and there only.
    """
    alpha, beta = 0.07, 0.4
    rewards = torch.tensor([0.3, -1.0, 2.0, 0.5, 0.0], dtype=torch.float64)
    lengths = torch.tensor([3.0, 11.0, 25.0, 1.0, 8.0], dtype=torch.float64)
    reference = torch.tensor([0.1, 0.3, 0.05, 0.25, 0.3], dtype=torch.float64).log()
    optimum = (reference + (rewards - alpha * lengths) / beta).log_softmax(0)

    def objective(logits: Tensor) -> Tensor:
        logprobs = logits.log_softmax(0)
        penalized = rewards - alpha * lengths
        return (logprobs.exp() * (penalized - beta * (logprobs - reference))).sum()

    def expected_loss(logits: Tensor, price: float) -> Tensor:
        logprobs = logits.log_softmax(0)
        w, l = torch.cartesian_prod(torch.arange(5), torch.arange(5)).T
        weights = (rewards[w] - rewards[l]).sigmoid()
        sides = (logprobs[w], logprobs[l], reference[w], reference[l], lengths[w], lengths[l])
        return PAIR_LOSSES["r_dpo"](*sides, weights, beta=beta, length_coeff=price)[0]

    leaf = optimum.clone().requires_grad_()
    (ascent,) = torch.autograd.grad(objective(leaf), leaf)
    assert ascent.abs().max() < 1e-12
    (slope,) = torch.autograd.grad(expected_loss(leaf, alpha), leaf)
    assert slope.abs().max() < 1e-12
    (turned,) = torch.autograd.grad(expected_loss(leaf, -alpha), leaf)
    assert turned.abs().max() > 0.1


def test_a_second_implementation_with_the_sign_turned_would_be_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = PAIR_LOSSES["r_dpo"]

    def turned(*tensors: Tensor, beta: float, length_coeff: float) -> Any:
        return original(*tensors, beta=beta, length_coeff=-length_coeff)

    monkeypatch.setitem(PAIR_LOSSES, "r_dpo", turned)
    with pytest.raises(AssertionError):
        test_a_loss_and_its_gradient_are_the_source_s("r_dpo")
