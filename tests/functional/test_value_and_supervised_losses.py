from __future__ import annotations

import math

import pytest
import torch

from oxrl.functional.supervised_losses import supervised_loss
from oxrl.functional.value_losses import value_loss
from oxrl.functional.weights import token_mean

NAN = float("nan")
ONE, TRUE = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [(0.9, 0.6, 0.045, 0.3), (0.2, 1.0, 0.32, -0.8), (0.9, 2.0, 0.845, 0.0)],
)
def test_the_clipped_value_loss(value: float, target: float, loss: float, slope: float) -> None:
    """E2b: old value .5, clip .2; in the last case the clipped branch is the larger one, so nothing
    pulls.
    """
    v = (value * ONE).requires_grad_()
    found, _ = value_loss(v, 0.5 * ONE, target * ONE, TRUE, ONE, value_clip=0.2)
    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found, v)[0].item() == pytest.approx(slope)


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    v = (0.9 * ONE).requires_grad_()
    found, metrics = value_loss(v, 0.5 * ONE, 2 * ONE, TRUE, ONE)
    assert found.item() == pytest.approx(1.1**2 / 2) and metrics["value/clip_frac"] == 0
    assert torch.autograd.grad(found, v)[0].item() == pytest.approx(-1.1)


def test_the_value_loss_ignores_padding_and_gives_no_gradient_to_its_targets() -> None:
    mask = torch.tensor([[True, False]])
    v, old, target = (torch.tensor([[x, NAN]], requires_grad=True) for x in (0.9, 0.5, 2.0))
    loss, _ = value_loss(v, old, target, mask, torch.tensor([[1.0, NAN]]), value_clip=0.2)
    loss.backward()
    assert (
        loss.item() == pytest.approx(0.845) and v.grad is not None and v.grad.tolist() == [[0, 0]]
    )
    assert old.grad is None and target.grad is None


def test_a_uniform_model_has_the_loss_log_of_the_vocabulary() -> None:
    mask = torch.tensor([[False, True, True], [False, True, False]])
    logprobs = torch.where(mask, -math.log(50), NAN)
    loss, metrics = supervised_loss(logprobs, mask, token_mean(mask))
    assert loss.item() == pytest.approx(math.log(50), rel=1e-6)
    assert metrics["update/nll"].item() == pytest.approx(math.log(50), rel=1e-6)


def test_the_supervised_gradient_is_minus_the_weight_however_rows_are_split() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    weights = token_mean(mask)
    logprobs = torch.where(mask, -1.0, NAN).requires_grad_()
    loss, _ = supervised_loss(logprobs, mask, weights)
    (whole,) = torch.autograd.grad(loss, logprobs)
    assert torch.equal(whole, -weights) and whole[mask].tolist() == [-0.25] * 4
    rows = [
        supervised_loss(logprobs[i : i + 1], mask[i : i + 1], weights[i : i + 1])[0]
        for i in range(2)
    ]
    assert torch.equal(torch.autograd.grad(sum(rows[1:], rows[0]), logprobs)[0], whole)
