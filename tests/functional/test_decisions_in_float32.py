"""What is kept, clipped or left out must not be decided by how float32 rounds: on a million random
tokens float32 decides as float64 does, but for the few that lie on a bound.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional.corrections import CORRECTIONS
from oxrl.functional.gates import gspo
from oxrl.functional.policy_losses import GATES
from oxrl.functional.selections import (
    above_row_quantile,
    covariance,
    select_clip_cov,
    select_kl_cov,
)
from oxrl.functional.value_losses import value_loss

ROWS, LENGTH, TOP = 1000, 1000, 4
# Rounding moves a token over a bound where it lies within some 1e-6 of it: of a million, one or so.
ON_A_BOUND = 20
# What float32 leaves of a gradient, as a share of the larger of it and 1.
NEAR = 1e-3


def drawn() -> dict[str, Tensor]:
    """Every tensor that a gate or correction may ask for, as float32 holds it."""
    draw = torch.Generator().manual_seed(0)
    shape = (ROWS, LENGTH)
    logprobs = -3 * torch.rand(shape, generator=draw) - 0.01
    moved = 0.3 * torch.randn(shape, generator=draw)
    # Many tokens did not move at all.
    moved[torch.rand(shape, generator=draw) < 0.2] = 0.0
    tops = torch.log_softmax(torch.randn(*shape, TOP + 1, generator=draw), -1)[..., :TOP]
    old_tops = torch.log_softmax(torch.randn(*shape, TOP + 1, generator=draw), -1)[..., :TOP]
    chosen = torch.rand(shape, generator=draw) < 0.1
    return {
        "logprobs": logprobs,
        "old_logprobs": (logprobs - moved).clamp(max=0.0),
        "advantages": torch.randn(shape, generator=draw),
        "mask": torch.rand(shape, generator=draw) < 0.9,
        "loss_weights": torch.ones(shape),
        "top_logprobs": tops,
        "old_top_logprobs": old_tops,
        "teacher_top_logprobs": old_tops,
        "teacher_logprobs": logprobs.roll(1),
        "candidate_logprobs": tops,
        "sampled_in_top": chosen,
        "sampled_is_top": chosen,
        "explore": torch.rand(shape, generator=draw) < 0.5,
        "selected": torch.rand(shape, generator=draw) < 0.1,
        "ages": torch.ones(ROWS, dtype=torch.int64),
        "router_shift": torch.rand(shape, generator=draw),
    }


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return drawn()


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def differing(first: Tensor, second: Tensor) -> int:
    """How many tokens have another gradient or weight."""
    first, second = first.double(), second.double()
    scale = torch.maximum(first.abs(), second.abs()).clamp(min=1.0)
    return int(((first - second).abs() > NEAR * scale).sum())


def gradient(gate: Callable[..., Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    wanted = set(inspect.signature(gate).parameters)
    given = {name: in_dtype(value, dtype) for name, value in tensors.items() if name in wanted}
    logprobs = given.pop("logprobs").clone().requires_grad_()
    loss, _ = gate(logprobs, **given)
    (found,) = torch.autograd.grad(loss, logprobs)
    return found


@pytest.mark.parametrize("name", [*GATES, "gspo"])
def test_a_gate_decides_alike(name: str, tensors: dict[str, Tensor]) -> None:
    gate = gspo if name == "gspo" else GATES[name]
    found = [gradient(gate, tensors, dtype) for dtype in (torch.float32, torch.float64)]
    # A bound of a whole row decides about all of its tokens.
    of_rows = LENGTH if name == "gspo" else 1
    assert differing(*found) <= ON_A_BOUND * of_rows


@pytest.mark.parametrize("clip", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_the_value_loss_decides_alike(clip: float, scale: float) -> None:
    draw = torch.Generator().manual_seed(1)
    values, old, returns = (torch.randn(1_000_000, generator=draw)[None] for _ in range(3))
    old = scale * old
    mask = torch.ones_like(values).bool()
    found: list[Tensor] = []
    for dtype in (torch.float32, torch.float64):
        given = values.to(dtype).requires_grad_()
        others = [x.to(dtype) for x in (old, returns)]
        weights = torch.ones_like(given)
        loss, _ = value_loss(given, *others, mask, weights, value_clip=clip)
        found += torch.autograd.grad(loss, given)
    assert differing(*found) <= ON_A_BOUND


def test_a_value_that_moved_less_than_the_clip_has_its_whole_gradient() -> None:
    numbers = (0.12320681661367416, 0.04456407204270363, 0.21333163976669312)
    value, old, target = (torch.tensor([[number]]) for number in numbers)
    value.requires_grad_()
    mask = torch.ones(1, 1).bool()
    loss, metrics = value_loss(value, old, target, mask, torch.ones(1, 1), value_clip=0.2)
    assert torch.autograd.grad(loss, value)[0].item() == pytest.approx(-0.0901248, rel=1e-5)
    assert metrics["value/clip_frac"] == 0


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_decides_alike(name: str, tensors: dict[str, Tensor]) -> None:
    correct = CORRECTIONS[name]
    wanted = inspect.signature(correct).parameters
    moved = tensors["logprobs"] - tensors["old_logprobs"]
    found: list[Tensor] = []
    for dtype in (torch.float32, torch.float64):
        given = {n: in_dtype(value, dtype) for n, value in tensors.items() if n in wanted}
        if "rho" in wanted:
            given["rho"] = moved.to(dtype).exp()
        if "rollout_logprobs" in wanted:
            given["rollout_logprobs"] = in_dtype(tensors["old_logprobs"], dtype)
        if "log_rho" in wanted:
            given["log_rho"] = moved.to(dtype)
        found.append(correct(**given))
    assert differing(*found) <= ON_A_BOUND * LENGTH


@pytest.mark.parametrize(("quantile", "places"), [(0.29, 100), (0.8, 35), (0.57, 100), (0.5, 7)])
def test_the_token_at_a_quantile_is_not_above_it(quantile: float, places: int) -> None:
    """Of 101 tokens the 30th lowest is at the quantile 0.29, whatever 0.29 * 100 comes out as."""
    entropy = torch.linspace(0.1, 3.0, places + 1)[None]
    mask = torch.ones_like(entropy).bool()
    found = above_row_quantile(entropy, mask, quantile=quantile)
    at = math.floor(Fraction(str(quantile)) * places)
    assert found[0].tolist() == [place > at for place in range(places + 1)]


@pytest.mark.parametrize(("fraction", "tokens"), [(0.29, 100), (0.57, 100), (0.07, 100), (0.3, 7)])
def test_a_share_that_is_whole_is_not_rounded_down(fraction: float, tokens: int) -> None:
    covariances = torch.linspace(0.1, 3.0, tokens)[None]
    found = select_kl_cov(covariances, torch.ones_like(covariances).bool(), fraction=fraction)
    assert int(found.sum()) == math.floor(Fraction(str(fraction)) * tokens)


def test_selections_decide_alike(tensors: dict[str, Tensor]) -> None:
    mask = tensors["mask"]
    found: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        logprobs, advantages = (tensors[n].to(dtype) for n in ("logprobs", "advantages"))
        covariances = covariance(logprobs, advantages, mask)
        noise = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        clipped = select_clip_cov(covariances, noise, mask, low=0.5, high=2.0, fraction=0.01)
        top = select_kl_cov(covariances, mask, fraction=0.01)
        found.append([clipped, top, above_row_quantile(-logprobs, mask, quantile=0.8)])
    for first, second in zip(*found, strict=True):
        assert first.any()
        assert differing(first, second) == 0
