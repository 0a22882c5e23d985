"""Drawing tokens: a pure function of (logits, seed, position), whatever else is in the batch.

argmax over the vocabulary of z / temperature - log E with E ~ Exponential(1) is a draw from
softmax(z / temperature) (the Gumbel trick). E comes from a counter-based hash of (seed, position,
token id), so nothing has a state, and a row draws the same tokens alone, in any batch, on any
device and after a crash.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64
_MIX_64 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_GOLDEN_32 = 0x9E3779B1 - 2**32
_MIX_32 = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)


def draw(
    logits: Tensor, keys: Tensor, *, temperature: Tensor, stochastic: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [n, V], already restricted to the tokens that may be drawn (others -inf).
        keys: [n] int64 from `noise_keys`.
        temperature: [n], positive.
        stochastic: [n], 1.0 for rows to sample and 0.0 for greedy rows; None samples every row.

    Returns:
        (token ids [n] int64, their logprobs [n] under softmax(logits / temperature)).
    """
    z = logits / temperature[:, None]
    noise = gumbel_noise(keys, z.shape[1], z.dtype)
    tokens = (
        z + noise if stochastic is None else torch.addcmul(z, noise, stochastic[:, None])
    ).argmax(1)
    logprobs = z.gather(1, tokens[:, None]).squeeze(1) - z.logsumexp(1)
    return tokens, logprobs


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """One 64-bit key per row from its seed and the index of the token in its response; both [n]
    int64.
    """
    return _mix_64(_mix_64(seeds + _GOLDEN_64) + positions * _GOLDEN_64)


def gumbel_noise(keys: Tensor, vocabulary: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard Gumbel noise [n, vocabulary], entry (i, v) a function of (keys[i], v). 32 random
    bits per entry.
    """
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    counter = torch.arange(vocabulary, dtype=torch.int32, device=keys.device) * _GOLDEN_32
    bits = _mix_32_(counter[None, :] ^ low[:, None])
    bits = _mix_32_(bits.add_(high[:, None]))
    # The smallest of 2**32 uniforms keeps all its precision; the largest must stay below 1.
    uniform = (
        (bits.to(torch.int64) & 0xFFFFFFFF)
        .to(dtype)
        .add_(0.5)
        .mul_(2.0**-32)
        .clamp_(max=1 - 2.0**-24)
    )
    return uniform.neg_().log1p_().neg_().log_().neg_()


def restrict(logits: Tensor, *, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set to -inf what top-k, then top-p at the temperature, leave out.

    Args:
        logits: [n, V].
        temperature: [n], positive.
        top_k: [n] int64, 0 keeps all.
        top_p: [n], 1.0 keeps all; else the fewest most likely tokens whose probabilities reach it.
    """
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    outside = (rank >= top_k[:, None]) & (top_k[:, None] > 0)
    probabilities = torch.softmax(
        ordered.masked_fill(outside, -torch.inf) / temperature[:, None], 1
    )
    before = probabilities.cumsum(1) - probabilities
    outside |= (before >= top_p[:, None]) & (top_p[:, None] < 1)
    outside[:, 0] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter_(1, order, outside), -torch.inf)


def _mix_64(x: Tensor) -> Tensor:
    """Finaliser of splitmix64; int64 arithmetic wraps."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_64[0]
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_64[1]
    return x ^ ((x >> 31) & (2**33 - 1))


def _mix_32_(x: Tensor) -> Tensor:
    """Finaliser of MurmurHash3 in place; int32 arithmetic wraps, and the mask makes the shifts
    logical.
    """
    x ^= (x >> 16).bitwise_and_(2**16 - 1)
    x *= _MIX_32[0]
    x ^= (x >> 13).bitwise_and_(2**19 - 1)
    x *= _MIX_32[1]
    x ^= (x >> 16).bitwise_and_(2**16 - 1)
    return x
