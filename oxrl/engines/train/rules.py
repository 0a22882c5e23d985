"""The optimizer that steps each weight, and the tensors that it keeps between steps."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, Module

from oxrl.models.weights import WeightType
from oxrl.tables.engines import Masters, Optimizer

# Weights of these types have masters.
LOW_PRECISION = (torch.bfloat16, torch.float16)
# Of bitsandbytes: values that share a scale, and how many a weight has at least to be kept so.
BLOCK = 256
FEWEST_VALUES = 4096


class Kept(NamedTuple):
    """A tensor that an optimizer keeps of a weight between steps.

    kind: its name, and that of its files. dtype: None: that of the weight, at least float32; it
    then has the weight's shape too. per: values of the weight for each of its own, in a row.
    """

    kind: str
    dtype: torch.dtype | None = None
    per: int = 1

    @property
    def like_weight(self) -> bool:
        """True if ranks hold pieces of it as they do of the weight."""
        return self.dtype is None

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
