"""What is decided about tokens before the update, over the whole optimizer step: which ones, and
how far they moved.

Everything here is detached. Means and quantiles run over the trained tokens of the batch given, so
call these on the full batch, never on a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    covariances: Tensor,
    noise: Tensor,
    mask: Tensor,
    *,
    low: float = 1.0,
    high: float = 5.0,
    fraction: float = 2e-4,
) -> Tensor:
    """A random `fraction` of all trained tokens, drawn among those with covariance in [low, high].
    [B, T] bool.

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
    """[B, T] bool: the token's entropy is above the `quantile` of its own row's trained tokens.
    SimKO's choice.
    """
    values = torch.where(mask, entropy.detach().double(), torch.nan)
    return mask & (values > values.nanquantile(quantile, dim=1, keepdim=True))


def router_shift(
    router_logprobs: Tensor, old_router_logprobs: Tensor, mask: Tensor, *, minimum: float = 0.8
) -> Tensor:
    """gamma = max(exp(-Delta), minimum), Delta = mean over layers and experts of |log p - log
    p_old|. [B, T].

    Both are [B, T, layers, K] logprobs of the experts that the old policy chose; masked tokens get
    1.
    Source: RSPO, arXiv:2510.23027; the minimum is a third party's, the paper's value was not
    verified.
    """
    delta = (router_logprobs - old_router_logprobs).detach().abs().mean((-1, -2))
    return fill_masked((-delta).exp().clamp(min=minimum), mask, 1.0)


# What the policy said of a whole rollout batch before the update, [B, T] or [B, T, K], by name:
# tokens, mask, advantages, noise, logprobs and, where asked for, entropy, top_ids, top_logprobs.
Looked = Mapping[str, Tensor]


def _covariance(x: Looked) -> Tensor:
    return covariance(x["logprobs"], x["advantages"], x["mask"])


# Row.gate -> (Looked, **numbers of PARAMETERS) -> the tensors which that gate takes by keyword; the
# current `top_logprobs`, which carry a gradient, come from the update itself.
SELECTIONS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "clip_cov": lambda x, cov_low, cov_high, cov_fraction: {
        "selected": select_clip_cov(
            _covariance(x), x["noise"], x["mask"], low=cov_low, high=cov_high, fraction=cov_fraction
        )
    },
    "kl_cov": lambda x, cov_fraction: {
        "selected": select_kl_cov(_covariance(x), x["mask"], fraction=cov_fraction)
    },
    "simko": lambda x, explore_quantile: {
        "old_top_logprobs": x["top_logprobs"],
        "sampled_is_top": x["top_ids"][..., 0] == x["tokens"],
        "explore": above_row_quantile(x["entropy"], x["mask"], quantile=explore_quantile),
    },
}
for _gate in ("dppo_topk_tv", "dppo_topk_kl"):
    SELECTIONS[_gate] = lambda x: {
        "old_top_logprobs": x["top_logprobs"],
        "sampled_in_top": (x["top_ids"] == x["tokens"][..., None]).any(-1),
    }
