"""One optimizer step that never applies a number which is not finite; used by every recipe."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.engines.train import TrainEngine
from oxrl.recipes.session import Session
from oxrl.types import LossFn, Metrics, Output, Tensors, TrainBatch, Want


class Gradients(NamedTuple):
    """The results of adding a gradient.

    output: what the model said. metrics: `update/loss` and the loss's own, over the whole batch.
    finite: nothing in the batch, the output or the loss is NaN or infinite.
    """

    output: Output
    metrics: Metrics
    finite: bool


def apply_step(
    engine: TrainEngine,
    session: Session,
    batch: TrainBatch,
    loss_fn: LossFn,
    want: Want,
    *,
    step: int,
) -> Metrics:
    """One optimizer step, refused and its batch kept when something is not finite.

    Args:
        engine: the model that learns.
        batch: what it reads, with the loss weights of the whole step.
        loss_fn: what is minimised.
        want: what the loss reads of the model's output.
        step: number of this optimizer step.

    Returns:
        Metrics of loss and step; `update/skipped` is 1 where the step was refused.
    """
    found = gradients(engine, batch, loss_fn, want)
    stepped = engine.optim_step() if found.finite else engine.skip_step()
    if stepped["update/skipped"]:
        session.dump(step, named_tensors(batch))
    return found.metrics | stepped


def gradients(engine: TrainEngine, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Gradients:
    """Add the gradient of one engine, unless the batch itself is not finite."""
    mask = batch.inputs.response_mask
    if not all_finite(*per_token(batch), mask=mask):
        return Gradients(output=Output(), metrics={"update/loss": math.nan}, finite=False)
    output = engine.forward_backward(batch, loss_fn, want)
    # Once more over the whole batch: what is reported must not depend on micro-batches.
    with torch.no_grad():
        loss, metrics = loss_fn(output, batch)
    said = (output.logprobs, output.entropy, output.values)
    finite = bool(loss.isfinite()) and all_finite(*said, mask=mask)
    reported = {"update/loss": float(loss)}
    reported |= {name: float(value) for name, value in metrics.items()}
    return Gradients(output=output, metrics=reported, finite=finite)


def per_token(batch: TrainBatch) -> list[Tensor]:
    """The batch's own numbers per token, [B, T] each."""
    shape = batch.inputs.response_mask.shape
    tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)]
    return [x for x in tensors if x.shape == shape and x.is_floating_point()]


def all_finite(*tensors: Tensor | None, mask: Tensor) -> bool:
    """No NaN and no infinity at the masked-in positions of any of the [B, T] tensors given."""
    known = [tensor for tensor in tensors if tensor is not None]
    return all(bool(torch.isfinite(tensor[mask]).all()) for tensor in known)


def named_tensors(batch: TrainBatch) -> Tensors:
    """A batch as named tensors, for rollouts/*.safetensors and the dumps of refused steps."""
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return tensors | batch.inputs.named()
