"""Weights with few bits: what a sampler computes with where it is to be smaller than the policy."""

from __future__ import annotations

import torch
from torch import Tensor

# Bits of a weight, by what `inference_engine.weights` calls them.
BITS = {"int8": 8}


def round_rows(weight: Tensor, bits: int) -> Tensor:
    """The nearest multiples of a step, of which each row has its own.

    Of a row the step is its largest absolute value / (2^(bits - 1) - 1), so 8 bits tell 255 values
    apart. No row depends on another, and no activation is rounded: a token still does not depend on
    the rows beside it.

    Args:
        weight: [..., N] of two dimensions or more is rounded; a vector, such as of a norm or of
            biases, stays as it is.
        bits: of a value, 2 or more.

    Returns:
        A tensor of the same shape and dtype; the same one where nothing is rounded.
    """
    if weight.dim() < 2:
        return weight
    values = weight.float()
    most = 2 ** (bits - 1) - 1
    step = values.abs().amax(-1, keepdim=True) / most
    # A row of zeros has no step.
    smallest = torch.finfo(torch.float32).tiny
    counts = (values / step.clamp(min=smallest)).round()
    return (counts * step).to(weight.dtype)
