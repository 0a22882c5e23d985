"""Activations that wait in CPU memory, not on the GPU, until the backward pass reads them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

# Smaller ones are not worth a copy.
FEWEST_BYTES = 1 << 16
Count = Callable[[int], None]


class Kept(NamedTuple):
    """A tensor that autograd keeps: itself, or a copy on the CPU and where it came from."""

    tensor: Tensor
    came_from: torch.device | None


def offloaded(count: Count | None = None) -> saved_tensors_hooks:
    """Make a context: activations that autograd saves inside go to the CPU, and back when read.

    Beside gradient checkpointing these are the inputs of the layers; what a layer computes again
    stays where it is. Weights stay too: they are on the device anyway.

    Args:
        count: told the bytes of every copy.
    """

    def pack(tensor: Tensor) -> Kept:
        if tensor.nbytes < FEWEST_BYTES or is_weight(tensor):
            return Kept(tensor, None)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        # Waited for: memory of the device that is still being read must not be given away.
        copy.copy_(tensor)
        if count is not None:
            count(copy.nbytes)
        return Kept(copy, tensor.device)

    def unpack(kept: Kept) -> Tensor:
        if kept.came_from is None:
            return kept.tensor
        return kept.tensor.to(kept.came_from)

    return saved_tensors_hooks(pack, unpack)


def is_weight(tensor: Tensor) -> bool:
    """True if it is a parameter, or a view of one, as a transposed matrix is."""
    whole = tensor if tensor._base is None else tensor._base  # pyright: ignore
    return isinstance(whole, Parameter)
