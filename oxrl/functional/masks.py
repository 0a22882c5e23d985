"""Masked reductions and the checks every function of this package starts with.

Padding may hold anything, NaN included: values are replaced by `torch.where` before any arithmetic,
never multiplied by a zero mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A tensor that some calls do without.
OptionalTensor = Tensor | None
# What a loss returns: the scalar to minimize, and detached scalar metrics by key.
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def require_same_shape(**tensors: OptionalTensor) -> None:
    """Refuse tensors of different shapes by name.

    Args:
        tensors: by their names; None is skipped.

    Raises:
        ValueError: names the first tensor whose shape is not that of the first one given.
    """
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_name, first = given[0]
    for name, tensor in given[1:]:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} "
                f"but {first_name} has shape {tuple(first.shape)}; "
                "all of them are token-aligned [B, T] tensors of the same batch"
            )


def at_least_float32(x: Tensor) -> Tensor:
    """Raise float16, bfloat16, bool and integers to float32; float64 stays float64.

    Args:
        x: any shape.

    Returns:
        The same values.
    """
    if x.dtype in (torch.float32, torch.float64):
        return x
    return x.float()


def fill_masked(x: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """Replace what is masked: no gradient and no NaN comes out of a masked position.

    Args:
        x: any shape.
        mask: bool, of that shape or broadcast to it.
        value: what stands where `mask` is False.

    Returns:
        `x` in at least float32.
    """
    x = at_least_float32(x)
    return torch.where(mask, x, torch.full_like(x, value))


def broadcast(row_values: Tensor, mask: Tensor) -> Tensor:
    """Give every masked-in token the value of its row.

    Args:
        row_values: [B].
        mask: [B, T] bool, trained tokens.

    Returns:
        [B, T], 0 where masked.
    """
    return torch.where(mask, row_values[:, None], 0.0)


def masked_sum(x: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Sum over the masked-in positions.

    Args:
        x, mask: [B, T].
        dim: sum along it; None for all positions.

    Returns:
        The sum, or sums.
    """
    return fill_masked(x, mask).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, *, dim: int | None = None) -> Tensor:
    """Mean over the masked-in positions.

    Args:
        x, mask: [B, T].
        dim: mean along it; None for all positions.

    Returns:
        The mean, or means; 0 where nothing is masked in.
    """
    count = mask.sum(dim).clamp(min=1)
    return masked_sum(x, mask, dim=dim) / count


def masked_values(x: Tensor, mask: Tensor) -> Tensor:
    """The masked-in values, as statistics are computed on them.

    Args:
        x, mask: [B, T].

    Returns:
        [N] float64, detached.
    """
    return x.detach()[mask].double()


def weighted_sum(x: Tensor, mask: Tensor, loss_weights: Tensor) -> Tensor:
    """Sum of loss_weights * x over the masked-in tokens: how every loss term ends.

    With an empty mask the result is 0 and still carries the graph of `x`, so that every rank runs
    its backward.

    Args:
        x, mask, loss_weights: [B, T].

    Returns:
        Scalar.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(x=x, mask=mask, loss_weights=loss_weights)
    return (fill_masked(x, mask) * fill_masked(loss_weights, mask)).sum()
