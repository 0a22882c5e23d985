"""Rows beside the functions of those who wrote them: random tensors that were given to theirs, and what
these returned, in recorded_of_others.json. None of their code is here.

Recorded in float64, nine digits, from Tencent-Hunyuan/UniRL 1a7b501e (`_drpo_loss`), verl-project/verl
1dda039b (`compute_policy_loss_dro`, both optimal token baselines), modelscope/ms-swift 3602360a
(`_compute_fipo_influence`, and the two lines of clip behind it), huggingface/trl f2cd5771 (`dft_loss`, and
`generalized_jsd_loss`, which test_divergences.py reads).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional.advantages import optimal_token_baseline
from oxrl.functional.policy_losses import GATES
from oxrl.functional.supervised_losses import dft_loss, supervised_loss
from oxrl.functional.weights import token_mean

RECORDED = json.loads((Path(__file__).parent / "recorded_of_others.json").read_text())


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(found: Tensor, recorded: Any) -> None:
    torch.testing.assert_close(found.double(), f64(recorded), rtol=0, atol=1e-6)


def of_gate(gate: str, numbers: dict[str, Any], logprobs: Tensor) -> Tensor:
    """The mean over tokens, as a loss."""
    mask = torch.tensor(RECORDED["mask"])
    weights = mask / mask.sum()
    given = (f64(RECORDED["old_logprobs"]), f64(RECORDED["advantages"]), mask, weights)
    return GATES[gate](logprobs, *given, **numbers)[0]


@pytest.mark.parametrize("at", range(len(RECORDED["gates"])))
def test_a_gate_has_the_loss_and_gradient_of_others(at: int) -> None:
    case = RECORDED["gates"][at]
    logprobs = f64(RECORDED["logprobs"]).requires_grad_()
    loss = of_gate(case["gate"], case["numbers"], logprobs)
    same(loss.detach(), case["loss"])
    same(torch.autograd.grad(loss, logprobs)[0], case["gradient"])


def differences(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Central differences of a number by every entry."""
    found = torch.zeros_like(at)
    for place in range(at.numel()):
        step = torch.zeros_like(at).flatten()
        step[place] = 1e-6
        moved = step.reshape(at.shape)
        found.view(-1)[place] = (function(at + moved) - function(at - moved)) / 2e-6
    return found


# fipo's factor is held fixed, and is no part of a slope.
SMOOTH = [case for case in RECORDED["gates"] if case["gate"] != "fipo"]


@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case["gate"])
def test_the_gradient_of_a_gate_is_the_slope_of_its_value(case: dict[str, Any]) -> None:
    at = f64(RECORDED["logprobs"])
    found = differences(lambda x: of_gate(case["gate"], case["numbers"], x), at)
    torch.testing.assert_close(found, f64(case["gradient"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case", RECORDED["optimal_token_baseline"], ids=lambda case: case["function"]
)
def test_the_token_baseline_is_that_of_others(case: dict[str, Any]) -> None:
    """Of responses that begin in one column, and of such with tokens between that were not sampled."""
    found = optimal_token_baseline(
        f64(case["token_rewards"]),
        torch.tensor(case["mask"]),
        torch.tensor(case["group_ids"]),
        f64(case["logprobs"]),
        f64(case["sum_p_squared"]),
    )
    same(found, case["advantages"])


def test_dynamic_fine_tuning_has_the_loss_and_gradient_of_others() -> None:
    case = RECORDED["dft"]
    logits = f64(case["logits"]).requires_grad_()
    labels = torch.tensor(case["labels"])
    mask = labels >= 0
    shifted = torch.nn.functional.pad(logits.log_softmax(-1)[:, :-1], (0, 0, 1, 0))
    logprobs = shifted.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    loss, metrics = dft_loss(logprobs, mask, token_mean(mask).double())
    same(loss.detach(), case["loss"])
    same(torch.autograd.grad(loss, logits)[0], case["gradient"])
    assert metrics["update/nll"].item() == pytest.approx(-logprobs[mask].mean().item())


def test_dynamic_fine_tuning_is_the_likelihood_where_every_token_is_certain() -> None:
    """And its slope is that of the likelihood times the probability, NaN and all beside the mask."""
    mask = torch.tensor([[True, True, False]])
    weights = f64([[0.5, 0.5, float("nan")]])
    sure = f64([[0.0, 0.0, float("nan")]]).requires_grad_()
    loss, _ = dft_loss(sure, mask, weights)
    plain, _ = supervised_loss(sure, mask, weights)
    same(torch.autograd.grad(loss, sure)[0], torch.autograd.grad(plain, sure)[0].tolist())
    half = f64([[0.5, 0.25, 1.0]]).log().requires_grad_()
    loss, _ = dft_loss(half, mask, weights)
    same(torch.autograd.grad(loss, half)[0], [[-0.25, -0.125, 0.0]])
