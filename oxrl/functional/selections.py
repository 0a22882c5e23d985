"""What is decided about tokens before the update, over the whole optimizer step: which ones, and how far they moved.

Everything here is detached. Means and quantiles run over the trained tokens of the batch given, so call these on the
full batch, never on a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.masks import fill_masked, masked_mean


def covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """cov_t = (A_t - mean A) * (logprob_t - mean logprob): which tokens drive entropy down. [B, T].

    Source: arXiv:2505.22617.
    """
    both = logprobs.detach().double(), advantages.detach().double()
    centered = [fill_masked(x, mask) - masked_mean(x, mask) for x in both]
    return fill_masked(centered[0] * centered[1], mask)


def select_clip_cov(
    covariances: Tensor, noise: Tensor, mask: Tensor, *, low: float = 1.0, high: float = 5.0, fraction: float = 2e-4
) -> Tensor:
    """A random `fraction` of all trained tokens, drawn among those with covariance in [low, high]. [B, T] bool.

    noise: [B, T] distinct numbers, the same on every rank: a hash of (draw, sample, position).
    """
    eligible = mask & (covariances >= low) & (covariances <= high)
    return _smallest(noise, eligible, round(fraction * int(mask.sum())))


def select_kl_cov(covariances: Tensor, mask: Tensor, *, fraction: float = 2e-4) -> Tensor:
    """The `fraction` of trained tokens with the largest covariance. [B, T] bool."""
    return _smallest(-covariances, mask, round(fraction * int(mask.sum())))


def _smallest(x: Tensor, eligible: Tensor, count: int) -> Tensor:
    chosen = torch.zeros_like(eligible)
    candidates = eligible.nonzero()
    order = torch.argsort(x[eligible], stable=True)[:count]
    chosen[tuple(candidates[order].T)] = True
    return chosen


def above_row_quantile(entropy: Tensor, mask: Tensor, *, quantile: float = 0.8) -> Tensor:
    """[B, T] bool: the token's entropy is above the `quantile` of its own row's trained tokens. SimKO's choice."""
    values = torch.where(mask, entropy.detach().double(), torch.nan)
    return mask & (values > values.nanquantile(quantile, dim=1, keepdim=True))


def router_shift(router_logprobs: Tensor, old_router_logprobs: Tensor, mask: Tensor, *, minimum: float = 0.8) -> Tensor:
    """gamma = max(exp(-Delta), minimum), Delta = mean over layers and experts of |log p - log p_old|. [B, T].

    Both are [B, T, layers, K] logprobs of the experts that the old policy chose; masked tokens get 1.
    Source: RSPO, arXiv:2510.23027; the minimum is a third party's, the paper's value was not verified.
    """
    delta = (router_logprobs - old_router_logprobs).detach().abs().mean((-1, -2))
    return fill_masked((-delta).exp().clamp(min=minimum), mask, 1.0)
