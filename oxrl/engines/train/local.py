"""The local engine, plain PyTorch in one process: LocalSampler works on the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from oxrl.engines.train.base import Bucket, Want
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.ranks import ALONE, Ranks
from oxrl.engines.train.trainer import LOW, Stored, Trainer, read_tokens
from oxrl.models.weights import buckets
from oxrl.types import Output, TokenBatch


class LocalTrainer(Trainer):
    """TrainEngine on the CPU or one GPU: the executable specification. Arguments as for
    `Trainer`.
    """

    def __init__(self, model: nn.Module, options: TrainerOptions, *, ranks: Ranks = ALONE) -> None:
        super().__init__(model, options, ranks=ranks)
        self._shard_model()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master_of(p) for name, p in self._parameters.items()}
        self._adam = self._optimizer(self._masters)

    # FsdpTrainer replaces these four; here every tensor is whole.

    def _shard_model(self) -> None:
        """Replace the model's parameters by this rank's pieces."""

    def _whole(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor that ranks hold pieces of; collective."""
        return tensor

    def _piece(self, tensor: Tensor) -> Tensor:
        """This rank's piece as a plain tensor."""
        return tensor

    def _cut_like(self, whole: Tensor, like: Tensor) -> Tensor:
        """`whole`, which every rank has, on the device and in the layout of `like`."""
        return whole.to(like.device)

    def _read(self, inputs: TokenBatch, want: Want) -> Output:
        return read_tokens(self.network, inputs, want, temperature=self.options.temperature)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()
        self._raise_gradients()

    @torch.no_grad()
    def _raise_gradients(self) -> None:
        """Add low-precision gradients to their float32 masters: a bf16 running sum would lose
        micro-batches.
        """
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return (
            (name, self._whole(p.grad)) for name, p in self._masters.items() if p.grad is not None
        )

    def _clip_and_step(self, lr: float) -> tuple[float, bool]:
        total_norm = get_total_norm([p.grad for p in self._masters.values() if p.grad is not None])
        norm = self._whole(total_norm).item()
        if not math.isfinite(norm):
            return norm, False
        if norm > self.options.max_grad_norm:
            clip_grads_with_norm_(self._masters.values(), self.options.max_grad_norm, total_norm)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)
        return norm, True

    def _drop_gradients(self) -> None:
        self._adam.zero_grad()

    def _shards(self) -> Iterator[tuple[Tensor, Mapping[str, Any] | None, float]]:
        for name, p in self._masters.items():
            held = self._adam.state[p] if p.grad is not None else {}
            pieces = {key: self._piece(value) for key, value in held.items()}
            yield self._piece(p.detach()), pieces or None, self._decays[name]

    def weights(self) -> Iterator[Bucket]:
        """See TrainEngine. On one rank the tensors are the model's own, not copies."""
        return buckets(
            (name, self._whole(p.detach()).to(self._stored[name][1]))
            for name, p in self.model.named_parameters()
        )

    def _state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._masters.items():
            held: dict[str, Tensor] = dict(self._adam.state[master])
            if self._stored[name][1] in LOW:
                held["master"] = master.detach()
            if kind in held:
                yield name, self._whole(held[kind])

    def _restore(self, weights: Iterable[Stored]) -> None:
        for name, weight, master, moments, steps in weights:
            parameter = self.model.get_parameter(name)
            parameter.copy_(self._cut_like(weight, parameter))
            if name not in self._masters:
                continue
            held = self._masters[name]
            if self._stored[name][1] in LOW:
                held.copy_(
                    self._cut_like(weight.to(held.dtype) if master is None else master, held)
                )
            self._adam.state.pop(held, None)
            if moments:
                state = {moment: self._cut_like(tensor, held) for moment, tensor in moments.items()}
                self._adam.state[held] = {
                    "step": torch.tensor(float(steps), device=held.device)
                } | state


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or the float32 copy that the optimizer steps instead."""
    return nn.Parameter(parameter.detach().float()) if parameter.dtype in LOW else parameter
