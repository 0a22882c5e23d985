"""The local engine, plain PyTorch in one process: LocalSampler works on the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from oxrl.checkpoint.layout import MASTER, WEIGHT, StoredWeight
from oxrl.checkpoint.shares import HeldWeights, PieceOfWeight
from oxrl.engines.train import Part
from oxrl.engines.train.optimizers import KINDS, LOW_PRECISION, Piece, adamw, has_master
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.trainer import Trainer
from oxrl.models.four_bit import whole_weight
from oxrl.models.stored import NamedTensors, Source
from oxrl.runs.ranks import ALONE, Ranks
from oxrl.types import Tensors

if TYPE_CHECKING:
    from oxrl.engines.train.forward import Check


class LocalTrainer(Trainer):
    """TrainEngine on the CPU or one GPU: the executable specification.

    Arguments as for `Trainer`.
    """

    def __init__(self, model: Module, options: TrainerOptions, *, ranks: Ranks = ALONE) -> None:
        super().__init__(model, options, ranks=ranks)
        self._begins_anew = ranks.world == 1
        self._shard_model()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: self._master_of(p) for name, p in self._parameters.items()}
        self._adam = self._build_optimizer()

    def _master_of(self, parameter: Parameter) -> Parameter:
        """Return the weight that the optimizer steps: the parameter itself, or a float32 copy."""
        if has_master(parameter.dtype, self.options.masters):
            return Parameter(parameter.detach().float())
        if parameter.dtype in LOW_PRECISION:
            parameter.grad_dtype = None  # sums of gradients are float32 all the same
        return parameter

    def _build_optimizer(self) -> torch.optim.Optimizer:
        options = self.options
        if options.optimizer == "adamw" and options.master_weights == "float32":
            return adamw(self._masters, self._decays, options)
        from oxrl.engines.train.per_weight_optimizers import (  # most runs step all at once
            PerWeightOptimizers,
            require_whole_blocks,
        )

        require_whole_blocks(self._masters, self._rules, self._place, self.ranks)
        return PerWeightOptimizers(
            self._masters,
            self._rules,
            self._decays,
            options,
            place=self._place,
            whole=self._whole,
        )

    # FsdpTrainer replaces these four; here every tensor is whole.

    def _shard_model(self) -> None:
        """Replace the model's parameters by this rank's pieces."""

    def _whole(self, tensor: Tensor) -> Tensor:
        """Join a tensor that ranks hold pieces of; collective."""
        return tensor

    def _piece(self, tensor: Tensor) -> Tensor:
        """Return this rank's piece as a plain tensor."""
        return tensor

    def _place(self, name: str, tensor: Tensor) -> PieceOfWeight:
        """Return this rank's piece of a tensor that belongs to weight `name`."""
        return PieceOfWeight(name, 0, tensor.detach().view(-1))

    def checked(self, check: Check) -> None:
        """See Trainer."""
        check()

    def _backward(self, loss: Tensor) -> None:
        loss.backward()
        self._raise_gradients()

    @torch.no_grad()
    def _raise_gradients(self) -> None:
        """Add low-precision gradients to their float32 masters, or sum them up in float32 without.

        A running sum in bf16 would lose micro-batches.
        """
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            gradient = parameter.grad
            if gradient is None:
                continue
            if master is parameter:
                if gradient.dtype in LOW_PRECISION:
                    parameter.grad = gradient.float()
                continue
            if master.grad is None:
                master.grad = gradient.to(master.dtype)
            else:
                master.grad += gradient
            parameter.grad = None

    def gradients(self) -> NamedTensors:
        """See Trainer."""
        for name, master in self._masters.items():
            if master.grad is not None:
                yield name, self._whole(master.grad)

    def _clip_and_step(self, lr: float) -> tuple[float, bool]:
        gradients = [p.grad for p in self._masters.values() if p.grad is not None]
        total_norm = get_total_norm(gradients)
        norm = self._whole(total_norm).item()
        if not isfinite(norm):
            return norm, False
        if norm > self.options.max_grad_norm:
            clip_grads_with_norm_(self._masters.values(), self.options.max_grad_norm, total_norm)
        for group in self._adam.param_groups:
            group["lr"] = lr * group["rate"]
            group["index"] = self.step
        self._adam.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)
        return norm, True

    def _drop_gradients(self) -> None:
        self._adam.zero_grad()

    def _pieces(self) -> Iterator[Piece]:
        for name, master in self._masters.items():
            state: Tensors = {}
            if master.grad is not None:
                held = self._adam.state[master]
                state = {key: self._piece(value) for key, value in held.items()}
            rate = self.options.rates.get(name, 1.0)
            change = getattr(self._adam, "changes", {}).get(master)
            yield Piece(
                self._piece(master.detach()), state or None, self._decays[name], rate, change
            )

    def _own_weights(self, part: Part) -> NamedTensors:
        for name, p in self._of(part):
            yield name, self._whole(whole_weight(p)).to(self._stored[name].dtype)

    def masters(self, part: Part) -> NamedTensors:
        """See Trainer."""
        for name, parameter in self._of(part):
            yield name, self._whole(whole_weight(self._masters.get(name, parameter)))

    def _trained(self) -> Iterable[str]:
        return self._masters

    def _adam_steps(self) -> dict[str, int]:
        states = {name: self._adam.state.get(master) for name, master in self._masters.items()}
        return {name: int(state["step"]) for name, state in states.items() if state}

    def _held(self) -> HeldWeights:
        for name, parameter in self.model.named_parameters():
            yield WEIGHT, self._place(name, parameter)
        for name, master in self._masters.items():
            if has_master(self._stored[name].dtype, self.options.masters):
                yield MASTER, self._place(name, master)
            for kind, held in self._adam.state.get(master, {}).items():
                if kind in KINDS:
                    yield kind, self._place_kept(name, kind, held)

    def _restore(self, weights: Iterable[StoredWeight]) -> None:
        for stored in weights:
            parameter = self.model.get_parameter(stored.name)
            master = self._masters.get(stored.name)
            if master is not parameter:
                self._fill(stored.name, parameter, stored.weight)
            if master is not None:
                low = self._stored[stored.name].dtype in LOW_PRECISION
                whole = stored.master if low and stored.master is not None else stored.weight
                self._fill(stored.name, master, whole)
                self._restore_moments(master, stored)

    def _restore_moments(self, master: Parameter, stored: StoredWeight) -> None:
        self._adam.state.pop(master, None)
        if not stored.moments:
            return
        state: Tensors = {}
        for kind, source in stored.moments.items():
            own = self._place(stored.name, master).values.numel()
            state[kind] = KINDS[kind].zeros(master, own)
            piece = self._place_kept(stored.name, kind, state[kind])
            source.fill(piece.values, piece.start)
        state["step"] = torch.tensor(float(stored.steps), device=master.device)
        self._adam.state[master] = state

    def _place_kept(self, name: str, kind: str, held: Tensor) -> PieceOfWeight:
        """Return this rank's piece of a tensor that the optimizer keeps of a weight."""
        kept = KINDS[kind]
        if kept.dtype is None:  # ranks hold pieces of it as they do of the weight
            return self._place(name, held)
        start = self._place(name, self._masters[name]).start
        return PieceOfWeight(name, start // kept.per, held)

    def _fill(self, name: str, tensor: Tensor, source: Source) -> None:
        """Read this rank's piece of a tensor that belongs to weight `name`."""
        piece = self._place(name, tensor)
        source.fill(piece.values, piece.start)
