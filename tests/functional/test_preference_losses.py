"""Preference losses against hand arithmetic, slow references in plain Python, and the properties
each must have.

The worked example, per-token log-probabilities:
    chosen   [-.5, -.4, -.6]      reference [-.7, -.6, -.7]       L_w = -1.5, R_w = -2.0, u =  0.5
    rejected [-1, -.9, -1.1, -.5] reference [-.9, -.8, -.9, -.4]  L_l = -3.5, R_l = -3.0, v = -0.5
so that the margin is 1 and, with beta 0.1, x = 0.1.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional import preference_losses as losses
from oxrl.functional.preference_pairs import log1mexp
from oxrl.functional.preference_statistics import dr_dpo_log_mean, kto_baseline, rank_match
from oxrl.tables.preference import METHODS

Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
# Rows with a loss of their own; the rest of the table is sums of them, or DPO on other
# log-probabilities.
ROWS = {
    n: row
    for n, row in METHODS.items()
    if row.loss and not row.parts and n not in ("ld_dpo", "sampo", "tr_dpo")
}
PAIRED = sorted(name for name, row in ROWS.items() if not row.unpaired)
# Losses that read lengths without dividing the margin by them.
ANCHORED = ("rpo", "irpo", "cpo", "r_dpo")


def loss_of(name: str) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    return {**losses.PAIR_LOSSES, **losses.SINGLE_LOSSES}[METHODS[name].loss]


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def example(u: float = 0.5, v: float = -0.5) -> Seven:
    """The seven tensors of the worked example; other log ratios move the reference."""
    return f64(-1.5), f64(-3.5), f64(-1.5 - u), f64(-3.5 - v), f64(3), f64(4), f64(1)


def random_pairs(count: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, dtype=torch.float64, generator=generator)

    chosen, rejected = uniform(-30, -1), uniform(-30, -1)
    lengths = [torch.randint(1, 9, (count,), generator=generator) for _ in range(2)]
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    return chosen, rejected, chosen + uniform(-3, 3), rejected + uniform(-3, 3), *lengths, weights


def extras_of(name: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The batch statistics or columns row `name` reads, over the whole batch."""
    chosen, rejected, ref_chosen, ref_rejected = (tensor.detach() for tensor in tensors[:4])
    u, v = chosen - ref_chosen, rejected - ref_rejected
    if name == "aot":
        return (rank_match(chosen - rejected, ref_chosen - ref_rejected),)
    if name == "aot_unpaired":
        return rank_match(u, v), rank_match(v, u)
    if name == "dr_dpo":
        return (dr_dpo_log_mean(-torch.nn.functional.logsigmoid(0.1 * (u - v)), tensors[6]),)
    columns = {"bco": f64(0.03).squeeze(), "beta_dpo": f64(0.1).squeeze()}
    ramp = torch.linspace(0.1, 0.9, len(chosen), dtype=torch.float64)
    return (columns.get(name, ramp),) if METHODS[name].extras else ()


# The worked values and the formulas below are written with these, whatever the defaults are.
WORKED_WITH: dict[str, dict[str, float]] = {
    "sppo": {"beta": 0.1},
    "cal_dpo": {"beta": 0.1},
    "rpo": {"beta": 0.1},
    "wpo": {"beta": 0.1},
    "alpha_dpo": {"gamma": 0.3, "alpha": 0.1},
    "alpha_po": {"gamma": 0.5},
}


def numbers_of(name: str) -> dict[str, float]:
    return METHODS[name].numbers | WORKED_WITH.get(name, {})


def run(name: str, tensors: tuple[Tensor, ...], **numbers: float) -> Tensor:
    return loss_of(name)(*tensors, *extras_of(name, tensors), **numbers_of(name) | numbers)[0]


def gradients(name: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    chosen, rejected = (tensor.clone().requires_grad_() for tensor in tensors[:2])
    run(name, (chosen, rejected, *tensors[2:])).backward()
    assert chosen.grad is not None
    return chosen.grad, torch.zeros_like(rejected) if rejected.grad is None else rejected.grad


WORKED = [
    ("dpo", {}, 0.644397),
    ("cdpo", {"label_noise": 0.1}, 0.654397),
    ("robust_dpo", {"label_noise": 0.1}, 0.631897),
    ("hinge", {}, 0.9),
    ("ipo_sum", {}, 16.0),
    ("ipo", {}, 22.168403),
    ("exo", {}, 2.589954),
    ("nca", {"beta": 0.1}, 1.361919),
    ("sppo", {}, 40.5),
    ("apo_zero", {}, 0.975005),
    ("apo_down", {}, 0.987518),
    ("discopop", {"beta": 0.1}, 0.873792),
    ("dpo_shift", {"rejected_scale": 0.75}, 0.650354),
    ("rpo", {}, 0.646897),
    ("irpo", {}, 1.144397),
    ("simpo", {"gamma": 0.5}, 0.498135),
    ("simpo", {}, 0.935635),
    ("orpo", {}, 0.538100),
    ("orpo", {"odds_coeff": 1.0}, 0.5 + 0.380998),
    ("cpo", {"nll_coeff": 0.0}, 0.598139),
    ("cpo", {}, 0.598139 + 0.5),
    ("dpop", {}, 0.644397),
    ("power", {}, 0.336865),
    # By hand: x = 0.1, sigmoid(-x) = 0.475021, exp(-x) = 0.904837, log 2 = 0.693147.
    ("gpo_exponential", {}, 0.904837),
    ("gpo_squared_hinge", {}, 0.81),
    ("gpo_savage", {}, 0.225645),
    ("cal_dpo", {}, 0.313262 + 40.5),
    ("c2_dpo", {}, 0.644397),
    ("minor_dpo", {}, 0.668460),  # u - max(0, v) = 0.5
    ("bpo", {}, 0.668460),  # min(0.5, 0.5) = 0.5
    ("r_dpo", {"length_coeff": 0.1}, 0.693147),  # 0.1 + 0.1 (3 - 4) = 0
    ("h_dpo", {}, 0.653947),  # 0.1 (0.9 * 2 - 1) = 0.08
    ("sigmoid_norm", {}, 0.209145),  # 5 (0.5 / 3 + 0.5 / 4) = 1.458333
    ("nll", {}, 0.5),
]


@pytest.mark.parametrize(("name", "numbers", "expected"), WORKED)
def test_a_loss_has_its_worked_value(name: str, numbers: dict[str, float], expected: float) -> None:
    assert float(run(name, example(), **numbers)) == pytest.approx(expected, abs=1e-6)


def test_bco_with_and_without_a_shift() -> None:
    """d = 0: -log sigmoid(.05) - log sigmoid(.05) = 1.336919; d = .03: softplus(-.02) +
    softplus(-.08) = 1.337145.
    """
    unshifted = losses.bco(*example(), f64(0.0).squeeze(), beta=0.1)[0]
    assert float(unshifted) == pytest.approx(1.336919, abs=1e-6)
    shifted = math.log1p(math.exp(-0.02)) + math.log1p(math.exp(-0.08))
    assert float(losses.bco(*example(), f64(0.03).squeeze(), beta=0.1)[0]) == pytest.approx(
        shifted, abs=1e-12
    )


def test_dpop_punishes_a_chosen_completion_below_the_reference() -> None:
    """u = -.2, v = -.5: DPO softplus(-.03) = .678260, DPOP softplus(-.1 (.3 - 5 * .2)) =
    .728760.
    """
    assert float(run("dpo", example(u=-0.2))) == pytest.approx(0.678260, abs=1e-6)
    assert float(run("dpop", example(u=-0.2))) == pytest.approx(0.728760, abs=1e-6)


AT_REFERENCE = {
    "dpo": math.log(2), "cdpo": math.log(2), "robust_dpo": math.log(2), "ipo": 25, "ipo_sum": 25,
    "hinge": 1, "rso": 1, "sigmoid_norm": math.log(2), "exo": 2.7612, "nca": 2 * math.log(2),
    "sppo": 50, "apo_zero": 1, "apo_down": 1, "aot": math.log(2), "aot_unpaired": math.log(2),
    "discopop": 0.8466, "f_dpo_forward_kl": math.log(2), "f_dpo_jensen_shannon": math.log(2),
    "f_dpo_alpha": math.log(2), "chi_po": math.log(2), "dpop": math.log(2),
    "dpo_shift": math.log(2), "beta_dpo": math.log(2), "c2_dpo": math.log(2), "bpo": math.log(2),
    "minor_dpo": math.log(2), "dr_dpo": math.log(2), "rpo": math.log(2) + 0.005 * 0.5,
    "irpo": math.log(2) + 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", AT_REFERENCE)
def test_a_policy_equal_to_its_reference_has_the_tabulated_loss(name: str) -> None:
    assert float(run(name, example(u=0, v=0))) == pytest.approx(AT_REFERENCE[name], abs=5e-5)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x: float) -> float:
    return math.log(sigmoid(x)) if x > -30 else x  # e**-30 is below every tolerance here


def log_odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


# The table's formulas in naive math: (Lw, Ll, Rw, Rl, nw, nl, extras) -> loss of one pair at the
# defaults.
SLOW: dict[str, Callable[..., float]] = {
    "dpo": lambda w, l, rw, rl, nw, nl: -log_sigmoid(0.1 * (w - rw - l + rl)),
    "cdpo": lambda w, l, rw, rl, nw, nl: (
        -0.9 * log_sigmoid(0.1 * (w - rw - l + rl)) - 0.1 * log_sigmoid(-0.1 * (w - rw - l + rl))
    ),
    "robust_dpo": lambda w, l, rw, rl, nw, nl: (
        (-0.9 * log_sigmoid(0.1 * (w - rw - l + rl)) + 0.1 * log_sigmoid(-0.1 * (w - rw - l + rl)))
        / 0.8
    ),
    "ipo": lambda w, l, rw, rl, nw, nl: ((w - rw) / nw - (l - rl) / nl - 5) ** 2,
    "ipo_sum": lambda w, l, rw, rl, nw, nl: (w - rw - l + rl - 5) ** 2,
    "hinge": lambda w, l, rw, rl, nw, nl: max(0, 1 - 0.1 * (w - rw - l + rl)),
    "rso": lambda w, l, rw, rl, nw, nl: max(0, 1 - 0.05 * (w - rw - l + rl)),
    "sigmoid_norm": lambda w, l, rw, rl, nw, nl: -log_sigmoid(5 * ((w - rw) / nw - (l - rl) / nl)),
    "exo": lambda w, l, rw, rl, nw, nl: (
        (q := sigmoid(0.1 * (w - rw - l + rl))) * math.log(q / 0.999)
        + (1 - q) * math.log((1 - q) / 0.001)
    ),
    "discopop": lambda w, l, rw, rl, nw, nl: (
        (1 - (s := sigmoid((x := 0.05 * (w - rw - l + rl)) / 0.05))) * -log_sigmoid(x)
        + s * math.exp(-x)
    ),
    "gpo_exponential": lambda w, l, rw, rl, nw, nl: math.exp(-0.1 * (w - rw - l + rl)),
    "gpo_squared_hinge": lambda w, l, rw, rl, nw, nl: max(0, 1 - 0.1 * (w - rw - l + rl)) ** 2,
    "gpo_savage": lambda w, l, rw, rl, nw, nl: sigmoid(-0.1 * (w - rw - l + rl)) ** 2,
    "focal_po": lambda w, l, rw, rl, nw, nl: (
        -(sigmoid(x := 0.1 * (w - rw - l + rl)) ** 0.05) * log_sigmoid(x)
    ),
    "nca": lambda w, l, rw, rl, nw, nl: (
        -log_sigmoid(0.01 * (w - rw))
        - 0.5 * log_sigmoid(0.01 * (rw - w))
        - 0.5 * log_sigmoid(0.01 * (rl - l))
    ),
    "bco": lambda w, l, rw, rl, nw, nl, d: (
        -log_sigmoid(0.01 * (w - rw) - d) - log_sigmoid(d - 0.01 * (l - rl))
    ),
    "sppo": lambda w, l, rw, rl, nw, nl: (w - rw - 5) ** 2 + (l - rl + 5) ** 2,
    "apo_zero": lambda w, l, rw, rl, nw, nl: 1 - sigmoid(0.1 * (w - rw)) + sigmoid(0.1 * (l - rl)),
    "apo_down": lambda w, l, rw, rl, nw, nl: (
        sigmoid(0.1 * (w - rw)) + 1 - sigmoid(0.1 * (w - rw - l + rl))
    ),
    "cal_dpo": lambda w, l, rw, rl, nw, nl: (
        -log_sigmoid(w - rw - l + rl) + (w - rw - 5) ** 2 + (l - rl + 5) ** 2
    ),
    "f_dpo_forward_kl": lambda w, l, rw, rl, nw, nl: (
        -log_sigmoid(0.1 * (math.exp(rl - l) - math.exp(rw - w)))
    ),
    "f_dpo_jensen_shannon": lambda w, l, rw, rl, nw, nl: (
        -log_sigmoid(0.1 * (log_sigmoid(w - rw) - log_sigmoid(l - rl)))
    ),
    "f_dpo_alpha": lambda w, l, rw, rl, nw, nl: (
        -log_sigmoid(0.1 * (math.exp(-0.5 * (w - rw)) - math.exp(-0.5 * (l - rl))) / -0.5)
    ),
    "chi_po": lambda w, l, rw, rl, nw, nl: (
        -log_sigmoid(0.1 * (w - rw + math.exp(w - rw) - (l - rl) - math.exp(l - rl)))
    ),
    "h_dpo": lambda w, l, rw, rl, nw, nl: -log_sigmoid(0.09 * (w - l) - 0.1 * (rw - rl)),
    "odpo": lambda w, l, rw, rl, nw, nl, d: -log_sigmoid(0.1 * (w - rw - l + rl) - d),
    "r_dpo": lambda w, l, rw, rl, nw, nl: -log_sigmoid(0.1 * (w - rw - l + rl) + 0.01 * (nw - nl)),
    "dpop": lambda w, l, rw, rl, nw, nl: -log_sigmoid(0.1 * (w - rw - l + rl - 5 * max(0, rw - w))),
    "dpo_shift": lambda w, l, rw, rl, nw, nl: -log_sigmoid(0.1 * (w - rw - 0.95 * (l - rl))),
    "bpo": lambda w, l, rw, rl, nw, nl: -log_sigmoid(0.1 * min(w - rw, rl - l)),
    "minor_dpo": lambda w, l, rw, rl, nw, nl: -log_sigmoid(0.1 * (w - rw - max(0, l - rl))),
    "c2_dpo": lambda w, l, rw, rl, nw, nl: (
        -log_sigmoid(0.1 * (w - rw - l + rl)) + 0.001 * (w - rw + l - rl) ** 2
    ),
    "rpo": lambda w, l, rw, rl, nw, nl: -log_sigmoid(0.1 * (w - rw - l + rl)) - 0.005 * w / nw,
    "irpo": lambda w, l, rw, rl, nw, nl: -log_sigmoid(0.1 * (w - rw - l + rl)) - w / nw,
    "aot": lambda w, l, rw, rl, nw, nl, m: -log_sigmoid(0.01 * (w - l - m)),
    "aot_unpaired": lambda w, l, rw, rl, nw, nl, v, u: -log_sigmoid(0.01 * (w - rw - v)),
    "beta_dpo": lambda w, l, rw, rl, nw, nl, b: -log_sigmoid(b * (w - rw - l + rl)),
    "wpo": lambda w, l, rw, rl, nw, nl, p: -p * log_sigmoid(0.1 * (w - rw - l + rl)),
    "alpha_dpo": lambda w, l, rw, rl, nw, nl, z: (
        -log_sigmoid(2.5 * (w / nw - l / nl) - 2.5 * (0.3 + 0.1 * z))
    ),
    "simpo": lambda w, l, rw, rl, nw, nl: -log_sigmoid(2.5 * (w / nw - l / nl) - 1.375),
    "alpha_po": lambda w, l, rw, rl, nw, nl: (
        -log_sigmoid(
            2.5 * (1 - math.exp(w / nw) ** -0.25) / 0.25
            - 2.5 * (1 - math.exp(l / nl) ** -0.25) / 0.25
            - 0.5
        )
    ),
    "cpo": lambda w, l, rw, rl, nw, nl: -log_sigmoid(0.1 * (w - l)) - w / nw,
    "orpo": lambda w, l, rw, rl, nw, nl: (
        -w / nw - 0.1 * log_sigmoid(log_odds(w / nw) - log_odds(l / nl))
    ),
    "power": lambda w, l, rw, rl, nw, nl: (
        -log_sigmoid(2 * (w / nw - l / nl + 1 / nw - 1 / nl)) - 5e-4 * 2 * w / nw
    ),
    "nll": lambda w, l, rw, rl, nw, nl: -w / nw,
}


@pytest.mark.parametrize("name", PAIRED)
def test_a_loss_equals_its_formula_in_plain_python(name: str) -> None:
    tensors = random_pairs(9)
    columns = [tensor.tolist() for tensor in tensors[:6]]
    if name == "dr_dpo":
        each = [SLOW["dpo"](*pair) for pair in zip(*columns, strict=True)]
        expected = -math.log(sum(math.exp(-loss) for loss in each) / 9)
    else:
        columns += [extra.expand(9).tolist() for extra in extras_of(name, tensors)]
        expected = sum(SLOW[name](*pair) for pair in zip(*columns, strict=True)) / 9
    assert float(run(name, tensors)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", PAIRED)
def test_micro_batches_give_the_gradient_of_the_whole_batch(name: str) -> None:
    tensors = random_pairs(12)
    whole, extras = gradients(name, tensors), extras_of(name, tensors)
    pieces, total = [], 0.0
    for rows in (slice(0, 1), slice(1, 6), slice(6, 12)):
        chosen, rejected, *rest = (tensor[rows] for tensor in tensors)
        chosen, rejected = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
        sliced = (extra[rows] if extra.ndim else extra for extra in extras)
        loss, _ = loss_of(name)(chosen, rejected, *rest, *sliced, **numbers_of(name))
        loss.backward()
        total += float(loss.detach())
        pieces.append(
            (chosen.grad, torch.zeros_like(rejected) if rejected.grad is None else rejected.grad)
        )
    for side in (0, 1):
        torch.testing.assert_close(
            torch.cat([piece[side] for piece in pieces]), whole[side], rtol=0, atol=1e-12
        )
    assert total == pytest.approx(float(run(name, tensors)), abs=1e-12)


@pytest.mark.parametrize("name", PAIRED)
def test_a_pair_of_weight_zero_gives_nothing_even_if_it_holds_nan(name: str) -> None:
    tensors = random_pairs(5)
    poisoned = [tensor.clone() for tensor in tensors]
    for tensor in poisoned[:4]:
        tensor[2] = math.nan
    poisoned[6][2] = 0.0
    clean = tuple(torch.cat((tensor[:2], tensor[3:])) for tensor in poisoned)
    extras = extras_of(name, clean)
    padded = [torch.cat((e[:2], f64(math.nan), e[2:])) if e.ndim else e for e in extras]
    chosen, rejected = poisoned[0].requires_grad_(), poisoned[1].requires_grad_()
    loss, metrics = loss_of(name)(chosen, rejected, *poisoned[2:], *padded, **numbers_of(name))
    loss.backward()
    expected, expected_metrics = loss_of(name)(*clean, *extras, **numbers_of(name))
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-12)
    assert chosen.grad is not None and chosen.grad.isfinite().all() and float(chosen.grad[2]) == 0.0
    assert rejected.grad is None or (
        rejected.grad.isfinite().all() and float(rejected.grad[2]) == 0.0
    )
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
        {k: float(v) for k, v in expected_metrics.items()}
    )


@pytest.mark.parametrize("name", PAIRED)
def test_all_weights_zero_give_a_zero_loss_with_a_graph(name: str) -> None:
    tensors = (*random_pairs(4)[:6], torch.zeros(4, dtype=torch.float64))
    extras = (f64(0.1).squeeze(),) if name == "dr_dpo" else extras_of(name, tensors)
    chosen = tensors[0].requires_grad_()
    loss, _ = loss_of(name)(chosen, *tensors[1:], *extras)
    loss.backward()
    assert float(loss.detach()) == 0.0 and chosen.grad is not None and not chosen.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PAIRED)
def test_loss_and_gradient_are_finite_at_huge_margins(name: str, dtype: torch.dtype) -> None:
    sizes = torch.tensor([-1e4, -1e4, -1e-9, -1e-9, -3e3, -5.0], dtype=dtype)
    tensors = (
        sizes,
        sizes.flip(0),
        sizes.roll(1),
        sizes.roll(2),
        torch.ones(6),
        torch.ones(6),
        torch.ones(6) / 6,
    )
    chosen, rejected = gradients(name, tensors)
    assert run(name, tensors).isfinite() and chosen.isfinite().all() and rejected.isfinite().all()


@pytest.mark.parametrize("name", PAIRED)
def test_gradient_reaches_the_policy_only(name: str) -> None:
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in random_pairs(4)]
    extras = [extra.clone().requires_grad_() for extra in extras_of(name, tuple(tensors))]
    loss_of(name)(*tensors, *extras, **METHODS[name].numbers)[0].backward()
    assert tensors[0].grad is not None and tensors[0].grad.any()
    assert all(tensor.grad is None for tensor in (tensors[2], tensors[3], *extras))


def test_bfloat16_is_raised_and_float64_is_kept() -> None:
    half = tuple(tensor.bfloat16() for tensor in example())
    assert run("dpo", half).dtype == torch.float32
    assert run("dpo", example()).dtype == torch.float64


def test_the_gradient_of_dpo_is_minus_beta_times_the_probability_of_the_wrong_order() -> None:
    """beta sigmoid(-x) = 0.1 * 0.475021 = 0.047502."""
    chosen, rejected = gradients("dpo", example())
    assert float(chosen) == pytest.approx(-0.047502, abs=1e-6)
    assert float(rejected) == pytest.approx(0.047502, abs=1e-6)


@pytest.mark.parametrize(
    "name", ["dpo", "hinge", "exo", "gpo_savage", "ipo_sum", "ipo", "sigmoid_norm"]
)
def test_swapping_a_pair_flips_the_margin(name: str) -> None:
    """Exchanging policy and reference negates u and v, so it must do the same as exchanging the
    completions.
    """
    chosen, rejected, ref_chosen, ref_rejected, n_w, n_l, weights = random_pairs(6)
    swapped = (rejected, chosen, ref_rejected, ref_chosen, n_l, n_w, weights)
    mirrored = (ref_chosen, ref_rejected, chosen, rejected, n_w, n_l, weights)  # u -> -u, v -> -v
    assert float(run(name, swapped)) == pytest.approx(float(run(name, mirrored)), abs=1e-12)
    metrics, flipped = (loss_of(name)(*t)[1] for t in (random_pairs(6), swapped))
    assert float(metrics["preference/margin"]) == pytest.approx(
        -float(flipped["preference/margin"])
    )
    assert float(metrics["preference/accuracy"]) == pytest.approx(
        1 - float(flipped["preference/accuracy"])
    )


def slope_at_margin(name: str, margin: float, **numbers: float) -> float:
    """Derivative by L_w where u = margin, v = 0, both completions of length one."""
    chosen = f64(-1.0).requires_grad_()
    tensors = (chosen, f64(-1), f64(-1 - margin), f64(-1), f64(1), f64(1), f64(1))
    loss_of(name)(*tensors, **numbers)[0].backward()
    assert chosen.grad is not None
    return float(chosen.grad)


@pytest.mark.parametrize("name", ["ipo", "ipo_sum"])
def test_ipo_is_least_where_the_margin_is_one_over_two_beta(name: str) -> None:
    assert slope_at_margin(name, 5.0) == pytest.approx(0, abs=1e-12)
    assert slope_at_margin(name, 4.9) < 0 < slope_at_margin(name, 5.1)


def test_cdpo_is_least_where_the_odds_are_those_of_a_clean_label() -> None:
    best = math.log(0.9 / 0.1) / 0.1
    assert slope_at_margin("cdpo", best) == pytest.approx(0, abs=1e-12)
    assert slope_at_margin("cdpo", best - 0.1) < 0 < slope_at_margin("cdpo", best + 0.1)


def test_limits_lead_back_to_the_parent_loss() -> None:
    tensors = random_pairs(7)
    dpo = float(run("dpo", tensors))
    for name, numbers in {
        "cdpo": {"label_noise": 0.0},
        "robust_dpo": {"label_noise": 0.0},
        "dpo_shift": {"rejected_scale": 1.0},
        "dpop": {"penalty_coeff": 0.0},
        "h_dpo": {"alpha": 1.0},
        "r_dpo": {"length_coeff": 0.0},
        "rpo": {"nll_coeff": 0.0},
        "c2_dpo": {"mass_coeff": 0.0},
        "focal_po": {"gamma": 0.0},
    }.items():
        assert float(run(name, tensors, **numbers)) == pytest.approx(dpo, abs=1e-12), name
    near = float(run("f_dpo_alpha", tensors, alpha=1 + 1e-7))
    assert near == pytest.approx(dpo, abs=1e-5)
    short = (*(tensor / 30 for tensor in tensors[:2]), *tensors[2:])
    assert float(run("alpha_po", short, alpha=1e-7, gamma=0.5)) == pytest.approx(
        float(run("simpo", short, gamma=0.5)), abs=1e-5
    )


def test_robust_dpo_is_unbiased_under_label_flips() -> None:
    """(1-e) loss(pair) + e loss(swapped pair) is the clean DPO loss."""
    chosen, rejected, ref_chosen, ref_rejected, n_w, n_l, weights = tensors = random_pairs(5)
    swapped = (rejected, chosen, ref_rejected, ref_chosen, n_l, n_w, weights)
    noisy = 0.9 * run("robust_dpo", tensors, label_noise=0.1) + 0.1 * run(
        "robust_dpo", swapped, label_noise=0.1
    )
    assert float(noisy) == pytest.approx(float(run("dpo", tensors)), abs=1e-12)


def test_a_step_down_the_gradient_raises_the_margin_under_every_loss() -> None:
    """Except DiscoPOP, which is not convex: just above x = 0 its slope points to a local minimum
    near x = -0.12.
    """
    for name in set(PAIRED) - {"discopop"}:
        chosen, rejected = gradients(name, example(u=0.1, v=0.05))
        assert float(chosen - rejected) < 0, name


def test_aot_equals_the_loss_of_the_sorted_lists_with_its_gradient() -> None:
    tensors = random_pairs(8)
    chosen, rejected = (tensor.clone().requires_grad_() for tensor in tensors[:2])
    gap = (chosen - rejected).sort().values - (tensors[2] - tensors[3]).sort().values
    direct = -torch.nn.functional.logsigmoid(0.01 * gap).mean()
    direct.backward()
    assert float(run("aot", tensors)) == pytest.approx(float(direct.detach()), abs=1e-12)
    for ours, theirs in zip(gradients("aot", tensors), (chosen.grad, rejected.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_unpaired_aot_equals_the_loss_of_the_sorted_lists_with_its_gradient() -> None:
    tensors = random_pairs(8)
    chosen, rejected = (tensor.clone().requires_grad_() for tensor in tensors[:2])
    gap = (chosen - tensors[2]).sort().values - (rejected - tensors[3]).sort().values
    direct = -torch.nn.functional.logsigmoid(0.01 * gap).mean()
    direct.backward()
    assert float(run("aot_unpaired", tensors)) == pytest.approx(float(direct.detach()), abs=1e-12)
    for ours, theirs in zip(
        gradients("aot_unpaired", tensors), (chosen.grad, rejected.grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_dr_dpo_has_the_gradient_of_the_log_mean_exp() -> None:
    tensors = random_pairs(8)
    chosen = tensors[0].clone().requires_grad_()
    margin = chosen - tensors[2] - (tensors[1] - tensors[3])
    each = -torch.nn.functional.logsigmoid(0.1 * margin)
    (-(-each).logsumexp(0)).backward()
    torch.testing.assert_close(gradients("dr_dpo", tensors)[0], chosen.grad, rtol=0, atol=1e-14)


def test_kto_has_its_worked_values_at_either_label() -> None:
    """z = .05: 1 - sigmoid(.1 (.5 - .05)) = .488752; 1 - sigmoid(.1 (.05 + .5)) = .486253."""
    z = f64(0.05).squeeze()
    for desirable, u, expected in ((True, 0.5, 0.488752), (False, -0.5, 0.486253)):
        loss, _ = losses.kto(f64(-1.5), f64(-1.5 - u), torch.tensor([desirable]), f64(1), z)
        assert float(loss) == pytest.approx(expected, abs=1e-6)
        weighted, _ = losses.kto(
            f64(-1.5),
            f64(-1.5 - u),
            torch.tensor([desirable]),
            f64(1),
            z,
            desirable_coeff=1.33,
            undesirable_coeff=0.7,
        )
        assert float(weighted) == pytest.approx(expected * (1.33 if desirable else 0.7), abs=1e-6)
        at_reference, _ = losses.kto(
            f64(-1.5), f64(-1.5), torch.tensor([desirable]), f64(1), f64(0).squeeze()
        )
        assert float(at_reference) == 0.5


def test_the_kto_baseline_is_not_negative_and_carries_no_gradient() -> None:
    logprobs = f64(-3, -4).requires_grad_()
    assert float(kto_baseline(logprobs, f64(-1, -1))) == 0.0
    z = kto_baseline(logprobs, f64(-4, -6))
    assert float(z) == 1.5 and not z.requires_grad
    attached = f64(0.05).squeeze().requires_grad_()
    loss, _ = losses.kto(
        logprobs, f64(-1, -1), torch.tensor([True, False]), f64(0.5, 0.5), attached
    )
    loss.backward()
    assert attached.grad is None and logprobs.grad is not None
    assert logprobs.grad[0] < 0 < logprobs.grad[1]


@pytest.mark.parametrize("function", [losses.kto, losses.bco_unpaired])
def test_single_completion_losses_are_exact_in_micro_batches_and_ignore_weight_zero(
    function: Any,
) -> None:
    logprobs, _, ref_logprobs = random_pairs(6)[:3]
    desirable, statistic = torch.tensor([True, False, True, True, False, False]), f64(0.2).squeeze()
    weights = f64(0.2, 0.2, 0.2, 0.2, 0.2, 0)
    logprobs[5] = math.nan

    def gradient(*slices: slice) -> Tensor:
        leaf = logprobs.clone().requires_grad_()
        for rows in slices:
            function(leaf[rows], ref_logprobs[rows], desirable[rows], weights[rows], statistic)[
                0
            ].backward()
        assert leaf.grad is not None
        return leaf.grad

    whole = gradient(slice(0, 6))
    torch.testing.assert_close(gradient(slice(0, 2), slice(2, 6)), whole, rtol=0, atol=1e-12)
    assert whole.isfinite().all() and float(whole[5]) == 0.0


def test_unpaired_bco_on_both_rows_of_a_pair_is_paired_bco() -> None:
    """-log sigmoid(.02) - log sigmoid(.08) with beta .1, d .03."""
    shift = f64(0.03).squeeze()
    labels = torch.tensor([True, False])
    single, _ = losses.bco_unpaired(
        f64(-1.5, -3.5), f64(-2, -3), labels, f64(1, 1), shift, beta=0.1
    )
    assert float(single) == pytest.approx(
        float(losses.bco(*example(), shift, beta=0.1)[0]), abs=1e-12
    )


def test_metrics_are_detached_means_and_show_both_log_probabilities() -> None:
    _, metrics = losses.dpo(*example())
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "preference/margin": 0.1,
            "preference/chosen_reward": 0.05,
            "preference/rejected_reward": -0.05,
            "preference/accuracy": 1.0,
            "preference/chosen_logprobs": -1.5,
            "preference/rejected_logprobs": -3.5,
            "preference/chosen_nll": 0.5,
        }
    )
    _, metrics = losses.dpo(*(tensor.requires_grad_() for tensor in example()))
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("name", PAIRED)
def test_a_row_says_what_its_loss_reads(name: str) -> None:
    row, tensors = METHODS[name], random_pairs(4)
    extras = extras_of(name, tensors)
    assert row.source in (inspect.getdoc(loss_of(name)) or "")
    parameters = inspect.signature(loss_of(name)).parameters
    assert tuple(parameters)[7 : 7 + len(row.extras)] == row.extras and len(extras) == len(
        row.extras
    )
    assert set(row.numbers) == {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    if name not in ("rso", "irpo"):  # another row's loss with another default
        assert all(parameters[number].default == value for number, value in row.numbers.items())
    chosen, rejected, ref_chosen, ref_rejected, n_w, n_l, weights = tensors
    without_reference = (chosen, rejected, None, None, n_w, n_l, weights)
    without_lengths = (chosen, rejected, ref_chosen, ref_rejected, None, None, weights)
    for given, needed in (
        (without_reference, row.reference),
        (without_lengths, row.per_token or name in ANCHORED),
    ):
        # alpha_dpo and aot read the reference inside their batch statistic only.
        if needed and name not in ("alpha_dpo", "aot"):
            with pytest.raises(ValueError, match="is None, but this loss reads it"):
                loss_of(name)(*given, *extras)
        elif not needed:
            assert loss_of(name)(*given, *extras)[0].isfinite()


def test_mixtures_are_weighted_sums_of_rows() -> None:
    """MPO on the example: .8 * .644397 + .2 * bco + .5."""
    assert all(part in ROWS for row in METHODS.values() for part in row.parts)
    total = sum(
        weight * losses.bco(*example(), f64(0).squeeze(), beta=0.1)[0]
        if name == "bco"
        else weight * run(name, example())
        for name, weight in METHODS["mpo"].parts.items()
    )
    assert float(total) == pytest.approx(0.8 * 0.644397 + 0.2 * 1.336919 + 0.5, abs=2e-6)


def test_wrong_shapes_and_numbers_say_what_to_do() -> None:
    tensors = random_pairs(4)
    with pytest.raises(
        ValueError, match=r"rejected_logprobs has shape \(3,\) but loss_weights has \(4,\)"
    ):
        losses.dpo(tensors[0], tensors[1][:3], *tensors[2:])
    with pytest.raises(ValueError, match="use simpo"):
        losses.alpha_po(*tensors, alpha=0.0)
    with pytest.raises(ValueError, match="use dpo"):
        losses.f_dpo_alpha(*tensors, alpha=1.0)
    with pytest.raises(ValueError, match="label_noise=0.5"):
        losses.robust_dpo(*tensors, label_noise=0.5)
    with pytest.raises(ValueError, match="label_noise=0.0"):
        losses.exo(*tensors, label_noise=0.0)
    with pytest.raises(ValueError, match="desirable must be bool"):
        losses.kto(tensors[0], tensors[1], torch.ones(4), tensors[6], f64(0).squeeze())


def test_log1mexp_keeps_its_digits_near_zero_and_far_below() -> None:
    """log(1 - e**-1e-10) = log(1e-10) - 5e-11; log(1 - e**-50) = -e**-50."""
    torch.testing.assert_close(
        log1mexp(f64(-1e-10)), f64(math.log(1e-10) - 5e-11), rtol=1e-14, atol=0
    )
    torch.testing.assert_close(log1mexp(f64(-50)), f64(-math.exp(-50)), rtol=1e-14, atol=0)
