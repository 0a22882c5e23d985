"""Stochastic rounding: an update too small for a bfloat16 is kept some of the time, not never."""

from __future__ import annotations

import torch
from torch import Tensor

# A float32 has 16 bits that a bfloat16 does not have.
NOISE = 1 << 16


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Round to one of the two nearest bfloat16, to each as often as the value is near to it.

    With a value x between neighbours a and b, b is chosen with probability (x - a) / (b - a), so
    the mean of many roundings is x.

    Args:
        values: [...] float32.
        noise: [...] int32, uniform in [0, 2^16), of the shape of `values`.

    Returns:
        [...] bfloat16. A value that is a bfloat16 already stays what it is; so do NaN and infinity.

    Raises:
        ValueError: of another type or shape.

    Source: Gupta et al. 2015, arXiv:1502.02551, section 3; on the bits of a float32, where adding
    to the bits below the last that is kept carries into it as often as it should.
    """
    if values.dtype != torch.float32:
        raise ValueError(f"values are {values.dtype}; what is rounded here is float32")
    if noise.dtype != torch.int32 or noise.shape != values.shape:
        raise ValueError(
            f"noise is {noise.dtype} {tuple(noise.shape)}; it has to be int32 "
            f"{tuple(values.shape)}, one number for each value"
        )
    bits = values.contiguous().view(torch.int32)
    raised = bits + noise
    kept = raised & -NOISE
    rounded = kept.view(torch.float32)
    finite = values.isfinite()
    return torch.where(finite, rounded, values).to(torch.bfloat16)
