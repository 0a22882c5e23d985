"""Choices of tokens that are made before the update, over the whole optimizer step.

Everything here is detached. Means and quantiles run over the trained tokens of the batch given, so
call these on the full batch, never on a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from oxrl.functional.masks import fill_masked, masked_mean
from oxrl.tables.numbers import COV_FRACTION, COV_HIGH, COV_LOW, EXPLORE_QUANTILE

# A share of a number of tokens that is whole may come out a little below: 0.29 * 100 is
# 28.999999999999996, of which 28 are left.
ALMOST_WHOLE = 1e-9


def covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute how each token's logprob and advantage covary: a high value drives entropy down.

    cov_t = (A_t - mean A) * (logprob_t - mean logprob)

    Args:
        logprobs: [B, T] nats.
        advantages: [B, T].
        mask: [B, T] bool, trained tokens.

    Returns:
        [B, T] float64, 0 where masked.

    Source: arXiv:2505.22617.
    """
    logprobs = logprobs.detach().double()
    advantages = advantages.detach().double()
    logprobs = fill_masked(logprobs, mask) - masked_mean(logprobs, mask)
    advantages = fill_masked(advantages, mask) - masked_mean(advantages, mask)
    return fill_masked(logprobs * advantages, mask)


def select_clip_cov(
    covariances: Tensor,
    noise: Tensor,
    mask: Tensor,
    *,
    low: float = COV_LOW.default,
    high: float = COV_HIGH.default,
    fraction: float = COV_FRACTION.default,
) -> Tensor:
    """A few random tokens among those whose covariance is high.

    Args:
        covariances: [B, T], of `covariance`.
        noise: [B, T] distinct numbers, the same on every rank: a hash of (draw, sample, position).
        mask: [B, T] bool, trained tokens.
        low, high: bounds of the covariance, exclusive.
        fraction: how many, of all trained tokens, rounded down; at least one; 0 for none.

    Returns:
        [B, T] bool.

    Source: Clip-Cov, arXiv:2505.22617, and PRIME-RL/Entropy-Mechanism-of-RL
    (verl/trainer/ppo/core_algos.py), which draws again for every micro-batch, from the tokens that
    PPO's clip leaves; here the ratio is still 1 and the clip leaves all.
    """
    eligible = mask & (covariances > low) & (covariances < high)
    return _smallest(noise, eligible, _share(fraction, mask))


def select_kl_cov(
    covariances: Tensor, mask: Tensor, *, fraction: float = COV_FRACTION.default
) -> Tensor:
    """The tokens with the largest covariance.

    Args:
        covariances: [B, T], of `covariance`.
        mask: [B, T] bool, trained tokens.
        fraction: how many, of all trained tokens, rounded down; at least one; 0 for none.

    Returns:
        [B, T] bool.

    Source: KL-Cov, arXiv:2505.22617, and PRIME-RL/Entropy-Mechanism-of-RL.
    """
    return _smallest(-covariances, mask, _share(fraction, mask))


def _share(fraction: float, mask: Tensor) -> int:
    """Return how many tokens are `fraction` of the trained ones: rounded down, but at least one.

    At the usual fraction, 2e-4, rounding alone would choose nothing in batches of a few thousand
    tokens, and the method would be another one without a word.
    """
    if fraction == 0:
        return 0
    return max(int(fraction * int(mask.sum()) + ALMOST_WHOLE), 1)


def _smallest(x: Tensor, eligible: Tensor, count: int) -> Tensor:
    """The `count` eligible tokens of smallest x, the earlier one of equals. [B, T] bool."""
    chosen = torch.zeros_like(eligible)
    candidates = eligible.nonzero()
    order = torch.argsort(x[eligible], stable=True)[:count]
    chosen[tuple(candidates[order].T)] = True
    return chosen


def above_row_quantile(
    entropy: Tensor, mask: Tensor, *, quantile: float = EXPLORE_QUANTILE.default
) -> Tensor:
    """Tokens of high entropy for their row: where SimKO explores.

    Args:
        entropy: [B, T] nats.
        mask: [B, T] bool, trained tokens.
        quantile: of the row's trained tokens, that a token has to be above.

    Returns:
        [B, T] bool.
    """
    values = torch.where(mask, entropy.detach().double(), torch.inf)
    # What lies above the quantile lies above the token at or next below it, which is compared
    # itself, and not with what interpolation makes of it.
    places = quantile * (mask.sum(1) - 1) + ALMOST_WHOLE
    bounds = values.sort(1).values.gather(1, places.long()[:, None])
    return mask & (values > bounds)


def router_shift(
    router_logprobs: Tensor, old_router_logprobs: Tensor, mask: Tensor, *, minimum: float = 0.8
) -> Tensor:
    """Turn how far the probabilities of a token's experts moved into a factor on its ratio.

    gamma = max(exp(-Delta), minimum),  Delta = mean over layers and experts of |log p - log p_old|

    Args:
        router_logprobs, old_router_logprobs: [B, T, layers, K] nats of the experts that the old
            policy chose.
        mask: [B, T] bool, trained tokens.
        minimum: smallest factor.

    Returns:
        gamma [B, T], 1 where masked.

    Source: RSPO, arXiv:2510.23027; the minimum is a third party's, the paper's value was not
    verified.
    """
    delta = (router_logprobs - old_router_logprobs).detach().abs().mean((-1, -2))
    return fill_masked((-delta).exp().clamp(min=minimum), mask, 1.0)


# What is known of the whole rollout batch before the update, [B, T] or [B, T, K], by name: tokens,
# mask, advantages, noise, logprobs and, where the policy was asked for them, entropy, top_ids,
# top_logprobs.
BatchTensors = Mapping[str, Tensor]
# What a gate takes by keyword besides numbers.
GateTensors = dict[str, Tensor]


class Selection(Protocol):
    """A cell of `SELECTIONS`; its numbers come by keyword."""

    def __call__(self, x: BatchTensors, *args: Any, **numbers: Any) -> GateTensors:
        """Choose tokens over the whole batch of a step, before it is cut.

        Args:
            x: tensors of the batch by name, [B, T].
            args: none; they let type checkers accept what a cell takes besides.
            numbers: of the cell.

        Returns:
            Tensors that the gate takes by these names.
        """
        ...


def _clip_cov_cell(
    x: BatchTensors, *, cov_low: float, cov_high: float, cov_fraction: float
) -> GateTensors:
    """`select_clip_cov` of what was found before the update."""
    mask = x["mask"]
    found = covariance(x["logprobs"], x["advantages"], mask)
    selected = select_clip_cov(
        found, x["noise"], mask, low=cov_low, high=cov_high, fraction=cov_fraction
    )
    return {"selected": selected}


def _kl_cov_cell(x: BatchTensors, *, cov_fraction: float) -> GateTensors:
    """`select_kl_cov` of what was found before the update."""
    mask = x["mask"]
    found = covariance(x["logprobs"], x["advantages"], mask)
    return {"selected": select_kl_cov(found, mask, fraction=cov_fraction)}


def _simko_cell(x: BatchTensors, *, explore_quantile: float) -> GateTensors:
    """The sampler's top tokens, and where `simko` explores."""
    most_likely = x["top_ids"][..., 0]
    explore = above_row_quantile(x["entropy"], x["mask"], quantile=explore_quantile)
    return {
        "old_top_logprobs": x["top_logprobs"],
        "sampled_is_top": most_likely == x["tokens"],
        "explore": explore,
    }


def _dppo_topk_cell(x: BatchTensors) -> GateTensors:
    """The sampler's top tokens, and where the sampled one is among them."""
    among = x["top_ids"] == x["tokens"][..., None]
    return {"old_top_logprobs": x["top_logprobs"], "sampled_in_top": among.any(-1)}


# Row.gate -> what it reads of the whole step. The current `top_logprobs`, which carry a gradient,
# come from the update itself.
SELECTIONS: dict[str, Selection] = {
    "clip_cov": _clip_cov_cell,
    "kl_cov": _kl_cov_cell,
    "simko": _simko_cell,
    "dppo_topk_tv": _dppo_topk_cell,
    "dppo_topk_kl": _dppo_topk_cell,
}
