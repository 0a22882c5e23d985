"""AdamW as the engines use it: the weights that decay, and the size of its last step."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter

from oxrl.engines.train.options import TrainerOptions
from oxrl.types import Metrics, TensorMap

MOMENTS = ("exp_avg", "exp_avg_sq")


class Piece(NamedTuple):
    """The part of some float32 weights that one rank holds and AdamW steps.

    state: "step" and the two moments; None where the last step moved nothing.
    decay: the weight decay. rate: the learning rate, as a multiple of the options'. change: norm of
    the last change, where it was measured.
    """

    weight: Tensor
    state: TensorMap | None
    decay: float
    rate: float = 1.0
    change: Tensor | None = None


def undecayed(model: Module) -> frozenset[str]:
    """Name the parameters that hold no matrix product: norms, biases and embeddings.

    An embedding that is the output head too is one of them.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, Embedding)}
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or id(parameter) in embeddings
    )


def weight_decays(model: Module, options: TrainerOptions) -> Metrics:
    """Return the decay of each parameter, by name."""
    spared = undecayed(model) if options.decay == "matrices" else frozenset[str]()
    return {
        name: 0.0 if name in spared else options.weight_decay
        for name, _ in model.named_parameters()
    }


def adamw(
    named: Mapping[str, Parameter], decays: Mapping[str, float], options: TrainerOptions
) -> torch.optim.AdamW:
    """torch's AdamW over `named`, with one group of parameters per weight decay and rate.

    A group's rate, a multiple of the learning rate, is its "rate".
    """
    groups: dict[tuple[float, float], list[Parameter]] = {}
    for name, parameter in named.items():
        key = (decays[name], options.rates.get(name, 1.0))
        groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": decay, "rate": rate}
            for (decay, rate), members in groups.items()
        ],
        lr=options.lr,
        betas=options.adam_betas,
        eps=options.adam_eps,
        fused=True,
    )


def last_change(piece: Piece, options: TrainerOptions, lr: float) -> Tensor:
    """Compute the norm of AdamW's last change of a piece from its moments: no weights are copied.

    A piece may be all that a rank holds, so what is computed stays in one tensor.
    """
    state = piece.state
    if not state:
        return torch.zeros((), dtype=torch.float64)
    if piece.change is not None:
        return piece.change
    beta1, beta2 = options.adam_betas
    step = float(state["step"])
    lr = lr * piece.rate
    root = sqrt(1 - beta2**step)
    denominator = state["exp_avg_sq"].sqrt().add_(options.adam_eps * root)
    change = torch.div(state["exp_avg"], denominator, out=denominator)
    change *= lr * root / (1 - beta1**step)
    decay = lr * piece.decay
    if decay:
        before = piece.weight + change
        before *= decay / (1 - decay)
        change += before
    return torch.linalg.vector_norm(change, dtype=torch.float64)
