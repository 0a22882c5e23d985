"""Masked reductions and the checks every function of this package starts with.

Padding may hold anything, NaN included: values are replaced by `torch.where` before any arithmetic,
never multiplied by a zero mask.
"""

from __future__ import annotations

import torch
from torch import Tensor


def require_same_shape(**tensors: Tensor | None) -> None:
    """Raise ValueError naming the first tensor whose shape differs from the first one given; None
    is skipped.
    """
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = given[0]
    for name, tensor in given[1:]:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but {first_name} has shape {tuple(first.shape)}; "
                "all of them are token-aligned [B, T] tensors of the same batch"
            )


def at_least_float32(x: Tensor) -> Tensor:
    """Raise float16, bfloat16, bool and integers to float32; float64 stays float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def fill_masked(x: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """`x` where `mask`, else `value`, in at least float32. No gradient and no NaN comes out of a
    masked position.
    """
    x = at_least_float32(x)
    return torch.where(mask, x, torch.full_like(x, value))


def masked_sum(x: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Sum of `x` over the masked-in positions, of all of them or along `dim`."""
    filled = fill_masked(x, mask)
    return filled.sum() if dim is None else filled.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Mean of `x` over the masked-in positions; 0 where there are none."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim=dim) / count.clamp(min=1)


def masked_values(x: Tensor, mask: Tensor) -> Tensor:
    """The masked-in values as one flat float64 tensor, detached: what statistics are computed
    on.
    """
    return x.detach()[mask].double()


def weighted_sum(x: Tensor, mask: Tensor, loss_weights: Tensor) -> Tensor:
    """sum_bt loss_weights * x over the masked-in tokens: how every loss term ends.

    With an empty mask the result is 0 and still carries the graph of `x`, so that every rank runs
    its backward.
    """
    require_same_shape(x=x, mask=mask, loss_weights=loss_weights)
    return (fill_masked(x, mask) * fill_masked(loss_weights, mask)).sum()
