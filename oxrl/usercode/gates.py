"""A policy loss of the user's own: a function of a file, or given to `oxrl.train` as it is.

It is tried on two rows before anything depends on it, and what it returns is looked at in every
call.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oxrl.errors import OxrlError
from oxrl.functional.masks import LossAndMetrics, OptionalTensor, fill_masked
from oxrl.tables.user_code import GATE
from oxrl.types import Tensors
from oxrl.usercode.find import find
from oxrl.usercode.gate_signature import POSITIONAL, WANTED

# Rows add up in another order than one batch does, in float32.
TOLERANCE = 1e-4


class OwnGate:
    """A gate of the user's, called with zeros wherever the mask leaves something out.

    Args:
        loss: `train.loss`.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, loss: str) -> None:
        self._code = find(GATE, loss)
        value = self._code.value
        if isinstance(value, type) or not callable(value):
            kind = getattr(value, "__name__", type(value).__name__)
            raise self.problem(f"{kind} is no function: {WANTED}")

    def __call__(
        self, *tensors: Tensor, correction: OptionalTensor = None, **further: Any
    ) -> LossAndMetrics:
        """Call the user's function; see `oxrl.functional.gates` for the arguments.

        Raises:
            ConfigError: it raised something, or gave no scalar loss with scalar metrics.
        """
        mask = tensors[POSITIONAL.index("mask")]
        filled = [x if x is mask else fill_masked(x, mask) for x in tensors]
        if correction is not None:
            correction = fill_masked(correction, mask)
        found = self._code.call(self._code.value, *filled, correction=correction, **further)
        return self._checked(found)

    def problem(self, text: str) -> OxrlError:
        """Return an error that says what is wrong with it."""
        return self._code.problem(text)

    def _checked(self, found: object) -> LossAndMetrics:
        if not isinstance(found, tuple | list) or len(found) != 2:
            kind = type(found).__name__
            raise self.problem(f"it gave {kind}, need two things, (loss, metrics); {WANTED}")
        loss, metrics = found
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise self.problem(
                f"its loss is {shown}, need a tensor with one number: multiply by loss_weights and "
                "sum()"
            )
        if not isinstance(metrics, Mapping):
            kind = type(metrics).__name__
            raise self.problem(f"its metrics are {kind}, need a mapping of names to numbers")
        told: Tensors = {}
        for name, value in metrics.items():
            number = torch.tensor(float(value)) if isinstance(value, int | float) else value
            if not isinstance(name, str) or not isinstance(number, Tensor) or number.numel() != 1:
                shown = type(value).__name__
                if isinstance(value, Tensor):
                    shown = f"a tensor of shape {list(value.shape)}"
                raise self.problem(f"its metric {name!r} is {shown}, need one number")
            told[name] = number.detach().reshape(())
        return loss.reshape(()), told


def try_gate(gate: OwnGate, numbers: Mapping[str, Any]) -> None:
    """Call a gate on two rows, with padding and away from the policy that sampled.

    Args:
        gate: the user's.
        numbers: of `train.loss_numbers`.

    Raises:
        ConfigError: it gives no finite loss with a gradient, or one that is not the sum over rows.
    """
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    old = torch.tensor([[-1.0, -0.5, -2.0, 0.0], [-0.7, -3.0, 0.0, 0.0]])
    moved = torch.tensor([[0.1, -0.2, 0.5, 0.0], [-0.05, 0.0, 0.0, 0.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0, 0.0], [-0.5, -0.5, 0.0, 0.0]])
    weights = mask / mask.sum()
    logprobs = (old + moved).requires_grad_()

    def loss_of(rows: slice) -> Tensor:
        parts = (logprobs[rows], old[rows], advantages[rows], mask[rows], weights[rows])
        return gate(*parts, correction=None, **numbers)[0]

    whole = loss_of(slice(0, 2))
    if not whole.requires_grad:
        raise gate.problem("its loss has no gradient: compute it from logprobs, without detach()")
    (gradient,) = torch.autograd.grad(whole, logprobs)
    value = float(whole.detach())
    if not whole.isfinite() or not gradient.isfinite().all():
        raise gate.problem(
            f"on a batch of ordinary numbers its loss is {value:g} with the gradient "
            f"{gradient[mask].tolist()}, which have to be finite"
        )
    rows = float(loss_of(slice(0, 1)).detach() + loss_of(slice(1, 2)).detach())
    if abs(rows - value) > TOLERANCE * max(1.0, abs(rows)):
        raise gate.problem(
            f"its loss of two rows is {value:g}, and {rows:g} row by row: a batch is cut "
            "into micro-batches, so the loss has to be a sum over rows; multiply each token by "
            "loss_weights and sum(), without a mean over the batch"
        )


def tried_gate(loss: str, numbers: Mapping[str, Any], *, sent: bool) -> str:
    """Find the gate of a run and try it; what was done, in words.

    Args:
        loss: `train.loss`.
        numbers: of `train.loss_numbers`.
        sent: training ranks get it, which are other processes.

    Raises:
        ConfigError: what is wrong with it.
    """
    gate = OwnGate(loss)
    try_gate(gate, numbers)
    if sent:
        pickle.dumps(gate)
    return f"{loss}, tried on two rows"
