"""Sampling tokens: a pure function of (logits, seed, position), whatever else is in the batch.

argmax over the vocabulary of z / temperature - log E with E ~ Exponential(1) is a sample of
softmax(z / temperature) (the Gumbel trick). E comes from a counter-based hash of (seed, position,
token id), so nothing has a state, and a row samples the same tokens alone, in any batch, on any
device and after a crash.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.engines.determinism import cumulative_sum
from oxrl.errors import required
from oxrl.functional.logprobs import logsumexp_of_rows

# Odd constants of the two hashes, as the signed integers of their width.
_GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64
_FIRST_64 = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_64 = 0x94D049BB133111EB - 2**64
_GOLDEN_32 = 0x9E3779B1 - 2**32
_FIRST_32 = 0x85EBCA6B - 2**32
_SECOND_32 = 0xC2B2AE35 - 2**32
# The likeliest tokens, among which the end of a top-p is looked for first: sorting all of a large
# vocabulary takes many times as long.
CANDIDATES = 1024


def sample_tokens(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor,
    stochastic: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits: [n, V], already restricted to the tokens that may be sampled (others -inf).
        seeds: [n] int64, of the requests.
        positions: [n] int64, the index of the token in its response.
        temperature: [n], positive.
        stochastic: [n], 1.0 for rows to sample and 0.0 for greedy rows; None samples every row.

    Returns:
        (token ids [n] int64, their logprobs [n] under softmax(logits / temperature)).
    """
    z = logits / temperature[:, None]
    noise = gumbel_noise(noise_keys(seeds, positions), z.shape[1], z.dtype)
    if stochastic is None:
        noisy = z + noise
    else:
        noisy = torch.addcmul(z, noise, stochastic[:, None])
    tokens = noisy.argmax(1)
    picked = z.gather(1, tokens[:, None]).squeeze(1)
    return tokens, picked - logsumexp_of_rows(z)


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Make one 64-bit key per row from its seed and the index of the token in its response.

    Args:
        seeds: [n] int64.
        positions: [n] int64.

    Returns:
        [n] int64.
    """
    hashed = _mix_64(seeds + _GOLDEN_64)
    return _mix_64(hashed + positions * _GOLDEN_64)


def gumbel_noise(keys: Tensor, vocabulary: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make standard Gumbel noise of which entry (i, v) is a function of (keys[i], v).

    Args:
        keys: [n] int64; 32 random bits per entry are made of each.
        vocabulary: number of tokens, V.

    Returns:
        [n, V].
    """
    low = keys.to(torch.int32)
    high = (keys >> 32).to(torch.int32)
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=keys.device)
    counter = tokens * _GOLDEN_32
    bits = _mix_32_(counter[None, :] ^ low[:, None])
    bits = _mix_32_(bits.add_(high[:, None]))
    unsigned = bits.to(torch.int64) & 0xFFFFFFFF
    # The smallest of 2**32 uniforms keeps all its precision; the largest must stay below 1.
    uniform = unsigned.to(dtype).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def restrict(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """Set to -inf what min-p, then top-k, then top-p leave out, all at the temperature.

    Args:
        logits: [n, V].
        temperature: [n], positive.
        top_k: [n] int64, 0 keeps all.
        top_p: [n], 1.0 keeps all; else the fewest most likely tokens whose probabilities reach it,
            of those that min-p and top-k keep.
        min_p: [n], 0.0 keeps all; else those that are at least this times as likely as the most
            likely token. None: off everywhere.

    Returns:
        [n, V]; the most likely token of a row always stays. Of equally likely tokens those with
        lower ids come first.
    """
    counted = top_k > 0
    by_mass = (top_p < 1) & ~counted
    if min_p is not None and bool((min_p > 0).any()):
        unlikely = _share(logits, temperature) < min_p[:, None]
        logits = logits.masked_fill(unlikely, -torch.inf)
    width = int(top_k.max())
    whole = temperature.new_zeros(len(logits))
    if bool(by_mass.any()):
        width = max(width, CANDIDATES)
        whole = cumulative_sum(_share(logits, temperature))[:, -1]
    if not width:
        return logits
    cuts = _Cuts(temperature, top_k, top_p, whole)
    left_out = None
    if width < logits.shape[1]:
        left_out = cuts.left_out(logits, width)
    if left_out is None:
        left_out = cuts.left_out(logits, logits.shape[1])
    return logits.masked_fill(required(left_out), -torch.inf)


def _share(logits: Tensor, temperature: Tensor) -> Tensor:
    """[n, V], probabilities over that of the likeliest token."""
    return torch.exp((logits - logits.amax(1, keepdim=True)) / temperature[:, None])


class _Cuts(NamedTuple):
    """Top-k and top-p of n rows; `whole`: of a row with top-p alone, what all shares add up to."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    whole: Tensor

    def left_out(self, logits: Tensor, width: int) -> Tensor | None:
        """Find what is left out, by sorting the likeliest tokens alone.

        Args:
            logits: [n, V].
            width: how many are sorted, no fewer than the largest top_k.

        Returns:
            [n, V]; None if a row needs more of them.
        """
        top_k = self.top_k[:, None]
        counted = top_k > 0
        by_mass = self.top_p[:, None] < 1
        ordered, order = _likeliest_first(logits, width)
        outside = counted & (torch.arange(width, device=logits.device) >= top_k)
        share = _share(ordered, self.temperature).masked_fill_(outside, 0.0)
        # Added one after the other: zeros behind them, as many as there are, change nothing.
        up_to_here = cumulative_sum(share)
        in_all = up_to_here[:, -1:]
        wanted = self.top_p[:, None] * torch.where(counted, in_all, self.whole[:, None])
        if width < logits.shape[1]:
            last = ordered[:, -1:]
            # Others that are as likely as the last one here may have lower ids, and come before it.
            shared = (logits >= last).sum(1, keepdim=True) > width
            shared &= (last > -torch.inf) & torch.where(counted, top_k == width, by_mass)
            too_few = by_mass & (in_all < wanted)
            if bool((shared | too_few).any()):
                return None
        outside |= by_mass & (up_to_here - share >= wanted)
        outside[:, 0] = False
        return (counted | by_mass).expand_as(logits).scatter(1, order, outside)


def _likeliest_first(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Sort the likeliest tokens by their logits, largest first; those with equal ones by their ids.

    Args:
        logits: [n, V].
        width: how many of them.

    Returns:
        Logits and ids, [n, width] each.
    """
    if width == logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True)
    ids = logits.topk(width).indices.sort(dim=1).values
    ordered, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ordered, ids.gather(1, order)


def _mix_64(x: Tensor) -> Tensor:
    """Finaliser of splitmix64; int64 arithmetic wraps, and the masks make the shifts logical."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _FIRST_64
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _SECOND_64
    return x ^ ((x >> 31) & (2**33 - 1))


def _mix_32_(x: Tensor) -> Tensor:
    """Finaliser of MurmurHash3, in place; int32 arithmetic wraps, masks make the shifts logical."""
    x ^= (x >> 16).bitwise_and_(2**16 - 1)
    x *= _FIRST_32
    x ^= (x >> 13).bitwise_and_(2**19 - 1)
    x *= _SECOND_32
    x ^= (x >> 16).bitwise_and_(2**16 - 1)
    return x
