"""The optimizer that steps each weight, the tensors that it keeps between steps, and AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter

from oxrl.engines.train.options import TrainerOptions
from oxrl.models.weights import WeightType
from oxrl.runs.device import where_float64_is
from oxrl.tables.engines import Masters, Optimizer
from oxrl.types import Metrics, TensorMap

# Weights of these types have masters.
LOW_PRECISION = (torch.bfloat16, torch.float16)
# Of bitsandbytes: values that share a scale, and how many a weight has at least to be kept so.
BLOCK = 256
FEWEST_VALUES = 4096
# What AdamW keeps of a weight.
MOMENTS = ("exp_avg", "exp_avg_sq")


class Kept(NamedTuple):
    """A tensor that an optimizer keeps of a weight between steps.

    kind: its name, and that of its files. dtype: None: that of the weight, at least float32; it
    then has the weight's shape too. per: values of the weight for each of its own, in a row.
    """

    kind: str
    dtype: torch.dtype | None = None
    per: int = 1

    def zeros(self, weight: Tensor, own: int) -> Tensor:
        """Make one of a weight that was never stepped.

        Args:
            weight: the piece of it that this rank holds.
            own: how many values that has.
        """
        if self.dtype is None:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            return torch.zeros_like(weight, dtype=dtype).detach()
        return torch.zeros(-(-own // self.per), dtype=self.dtype, device=weight.device)

    def stored_as(self, weight: WeightType) -> WeightType:
        """Return the shape and type of the whole of it.

        Args:
            weight: as it is stored.
        """
        if self.dtype is None:
            return WeightType(weight.shape, torch.promote_types(weight.dtype, torch.float32))
        count = -(-prod(weight.shape) // self.per)
        return WeightType(torch.Size([count]), self.dtype)


KEPT: Mapping[Optimizer, tuple[Kept, ...]] = MappingProxyType(
    {
        "adamw": (Kept("exp_avg"), Kept("exp_avg_sq")),
        "muon": (Kept("momentum_buffer"),),
        # Codes into the dynamic map of bitsandbytes, and the largest value of each block.
        "adamw_8bit": (
            Kept("exp_avg_code", torch.uint8),
            Kept("exp_avg_absmax", torch.float32, BLOCK),
            Kept("exp_avg_sq_code", torch.uint8),
            Kept("exp_avg_sq_absmax", torch.float32, BLOCK),
        ),
    }
)
KINDS: Mapping[str, Kept] = MappingProxyType(
    {kept.kind: kept for of_rule in KEPT.values() for kept in of_rule}
)


def has_master(dtype: torch.dtype, masters: Masters) -> bool:
    """True if a weight that is stored as `dtype` is stepped as a float32 copy."""
    return masters == "float32" and dtype in LOW_PRECISION


def rules_of(model: Module, head: Tensor, optimizer: Optimizer) -> dict[str, Optimizer]:
    """Choose the optimizer of each parameter of a model, by name.

    Muon is for matrices between hidden layers: embeddings, the head, norms, biases and convolutions
    are AdamW's, as its authors have it. Experts that are stored as one tensor are matrices each.
    Source: Keller Jordan, kellerjordan.github.io/posts/muon, "Empirical considerations".
    Weights of few values keep float32 moments beside 8-bit ones, as bitsandbytes has it.

    Args:
        model: before an engine cuts it up.
        head: the weight of its output.
        optimizer: that was asked for.
    """
    if optimizer == "adamw":
        return dict.fromkeys((name for name, _ in model.named_parameters()), "adamw")
    hidden = _hidden_matrices(model, head) if optimizer == "muon" else frozenset[int]()
    found: dict[str, Optimizer] = {}
    for name, parameter in model.named_parameters():
        large = optimizer == "adamw_8bit" and parameter.numel() >= FEWEST_VALUES
        found[name] = optimizer if large or id(parameter) in hidden else "adamw"
    return found


def _hidden_matrices(model: Module, head: Tensor) -> frozenset[int]:
    """Find the parameters that Muon steps, by their ids."""
    ends = {id(module.weight) for module in model.modules() if isinstance(module, Embedding)}
    ends.add(id(head))
    found: set[int] = set()
    for module in model.modules():
        # As transformers calls modules whose weights are [experts, out, in].
        experts = "Experts" in type(module).__name__
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 2 or (experts and parameter.ndim == 3):
                found.add(id(parameter))
    return frozenset(found - ends)


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


def last_change(piece: Piece, options: TrainerOptions, lr: float) -> float:
    """Compute the norm of AdamW's last change of a piece from its moments: no weights are copied.

    A piece may be all that a rank holds, so what is computed stays in one tensor.
    """
    state = piece.state
    if not state:
        return 0.0
    if piece.change is not None:
        return piece.change.item()
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
    return torch.linalg.vector_norm(where_float64_is(change), dtype=torch.float64).item()
