"""Rows beside the functions of those who wrote them: random tensors that were given to theirs, and what
these returned, in recorded_of_others.json. None of their code is here.

Recorded in float64, nine digits, from Tencent-Hunyuan/UniRL 1a7b501e (`_drpo_loss`), verl-project/verl
1dda039b (`compute_policy_loss_dro`), modelscope/ms-swift 3602360a (`_compute_fipo_influence`, and the
two lines of clip behind it).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional.policy_losses import GATES

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
