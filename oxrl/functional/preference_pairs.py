"""The calling convention of the pair losses: the tensors, the weighted sum, the metrics.

A formula on `Pairs` becomes a loss by `@pair_loss`. All of them are then called with the same tensors, so that a recipe
takes one from the table by name, or adds several with weights over one shared forward.

Args of every pair loss, [N] each:
    chosen_logprobs, rejected_logprobs: nats, sums over a completion's trained tokens. Gradient flows here only.
    ref_chosen_logprobs, ref_rejected_logprobs: the same of the frozen reference; None where the loss has none.
    chosen_lengths, rejected_lengths: trained tokens (counts below 1 are read as 1); None where not needed.
    loss_weights: 1 / (pairs of the global batch), 0 for a pair to leave out. The loss is
        (pair_loss * loss_weights).sum(), so micro-batches and ranks add up to the same gradient.
    extras (some losses): data columns, or what depends on the whole batch, scalar or [N], detached, from a function of
        `preference_statistics.py` run once over the global batch: micro-batching stays exact.
    numbers: keyword only.

Returns the scalar to minimize, in at least float32, and detached metrics, means over the pairs that count, under
`preference/`: margin, chosen_reward and rejected_reward (nats, times beta if it is a number of the loss), accuracy,
chosen_logprobs (watch them: a loss on margins may lower both) and rejected_logprobs, chosen_nll per token where lengths
are given. Raises ValueError when a tensor has another shape, or is missing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from oxrl.functional.masks import at_least_float32

P = ParamSpec("P")
Loss = tuple[Tensor, dict[str, Tensor]]
PairLoss = Callable[
    Concatenate[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor, P], Loss
]


@dataclass(frozen=True)
class Pairs:
    """The seven tensors of a pair loss, checked, raised to float32 and with left-out pairs replaced by zeros."""

    chosen: Tensor
    rejected: Tensor
    given_ref_chosen: Tensor | None
    given_ref_rejected: Tensor | None
    given_chosen_lengths: Tensor | None
    given_rejected_lengths: Tensor | None

    @property
    def chosen_ratio(self) -> Tensor:
        """u = log policy / reference of the chosen completion, [N]."""
        return self.chosen - _required(self.given_ref_chosen, "ref_chosen_logprobs")

    @property
    def rejected_ratio(self) -> Tensor:
        """v = log policy / reference of the rejected completion, [N]."""
        return self.rejected - _required(self.given_ref_rejected, "ref_rejected_logprobs")

    @property
    def margin(self) -> Tensor:
        return self.chosen_ratio - self.rejected_ratio

    @property
    def chosen_lengths(self) -> Tensor:
        return _required(self.given_chosen_lengths, "chosen_lengths").clamp(min=1)

    @property
    def rejected_lengths(self) -> Tensor:
        return _required(self.given_rejected_lengths, "rejected_lengths").clamp(min=1)

    @property
    def mean_chosen(self) -> Tensor:
        return self.chosen / self.chosen_lengths

    @property
    def mean_rejected(self) -> Tensor:
        return self.rejected / self.rejected_lengths

    @property
    def mean_margin(self) -> Tensor:
        """Margin of the per-token mean log ratios, [N]."""
        return self.chosen_ratio / self.chosen_lengths - self.rejected_ratio / self.rejected_lengths


def _required(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"{name} is None, but this loss reads it; pass a [N] tensor")
    return tensor


def filled(tensor: Tensor, trained: Tensor, name: str) -> Tensor:
    """`tensor` [N] (or a scalar) with zeros where not `trained`: a left-out pair may hold nan, and nan * 0 is nan."""
    if tensor.ndim != 0 and tensor.shape != trained.shape:
        shapes = f"shape {tuple(tensor.shape)} but loss_weights has {tuple(trained.shape)}"
        raise ValueError(f"{name} has {shapes}; a preference loss takes one number per pair, [N]")
    tensor = at_least_float32(tensor)
    return torch.where(trained, tensor, torch.zeros_like(tensor)) if tensor.ndim else tensor


def _constant(tensor: Tensor | None, trained: Tensor, name: str) -> Tensor | None:
    return None if tensor is None else filled(tensor.detach(), trained, name)


def weighted_loss(losses: Tensor, loss_weights: Tensor) -> Tensor:
    """(losses * loss_weights).sum() over the entries with a weight; the others give neither value nor gradient."""
    losses = torch.where(loss_weights != 0, losses, torch.zeros_like(losses))
    return (losses * loss_weights.to(losses.dtype)).sum()


def pair_loss(formula: Callable[Concatenate[Pairs, P], Tensor]) -> PairLoss[P]:
    """Turn a formula (pairs, *extras, **numbers) -> [N] into a loss with the arguments of the module docstring."""
    parameters = list(inspect.signature(formula).parameters.values())[1:]

    def loss(
        chosen_logprobs: Tensor,
        rejected_logprobs: Tensor,
        ref_chosen_logprobs: Tensor | None,
        ref_rejected_logprobs: Tensor | None,
        chosen_lengths: Tensor | None,
        rejected_lengths: Tensor | None,
        loss_weights: Tensor,
        *extras: P.args,
        **numbers: P.kwargs,
    ) -> Loss:
        trained = loss_weights != 0
        pairs = Pairs(
            filled(chosen_logprobs, trained, "chosen_logprobs"),
            filled(rejected_logprobs, trained, "rejected_logprobs"),
            _constant(ref_chosen_logprobs, trained, "ref_chosen_logprobs"),
            _constant(ref_rejected_logprobs, trained, "ref_rejected_logprobs"),
            _constant(chosen_lengths, trained, "chosen_lengths"),
            _constant(rejected_lengths, trained, "rejected_lengths"),
        )
        constants = (_constant(extra, trained, f"extra tensor {i}") for i, extra in enumerate(extras))  # pyright: ignore
        losses = formula(pairs, *constants, **numbers)  # pyright: ignore
        beta = numbers.get("beta", (formula.__kwdefaults__ or {}).get("beta", 1.0))
        return weighted_loss(losses, loss_weights), preference_metrics(pairs, trained, beta=float(beta))  # pyright: ignore

    # help(dpo) shows the tensors a caller passes, not the formula's `pairs`.
    shown = inspect.signature(loss).parameters.values()
    tensors = [parameter for parameter in shown if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    functools.update_wrapper(loss, formula)
    loss.__signature__ = inspect.Signature(tensors + parameters, return_annotation="Loss")  # pyright: ignore
    return loss


@torch.no_grad()
def preference_metrics(pairs: Pairs, trained: Tensor, *, beta: float) -> dict[str, Tensor]:
    """Means over the `trained` [N] pairs; without a reference the rewards are the policy's own log-probabilities."""
    referenced = pairs.given_ref_chosen is not None and pairs.given_ref_rejected is not None
    chosen, rejected = (pairs.chosen_ratio, pairs.rejected_ratio) if referenced else (pairs.chosen, pairs.rejected)
    values = {
        "margin": beta * (chosen - rejected),
        "chosen_reward": beta * chosen,
        "rejected_reward": beta * rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "chosen_logprobs": pairs.chosen,
        "rejected_logprobs": pairs.rejected,
    }
    if pairs.given_chosen_lengths is not None:
        values["chosen_nll"] = -pairs.mean_chosen
    count = trained.sum().clamp(min=1)
    return {f"preference/{name}": torch.where(trained, value, 0.0).sum() / count for name, value in values.items()}
