"""Policy losses. Every gate has one signature and one ending.

    gate(logprobs, old_logprobs, advantages, mask, loss_weights, *, correction=None, <numbers>) -> (loss, metrics)
    loss = -sum_bt  correction * loss_weights * S(r, A)          r = exp(logprobs - old_logprobs)

A gate decides two things about a token, elementwise: the value S of its surrogate and its effective weight
w = (dS / d logprobs) / A. `_loss` turns them into a scalar whose value is S and whose gradient is exactly w * A,
whatever torch does at ties of min, max and clamp. Row-level ratios come in through `old_logprobs` (see ratios.py).

Args of every gate:
    logprobs: [B, T] nats, token-aligned, current policy. The gradient flows here only.
    old_logprobs: [B, T] nats, the policy that the ratio is measured against; detached.
    advantages: [B, T]; detached.
    mask: [B, T] bool, trained tokens. Every other position may hold anything, NaN included.
    loss_weights: [B, T], normalised over the global batch (functional/weights.py).
    correction: [B, T] or None, multiplies the policy term only (functional/corrections.py); detached.

Returns of every gate: scalar loss to minimise in at least float32, and detached scalar metrics over this call's tokens.
Raises of every gate: ValueError when shapes differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.functional.masks import fill_masked, masked_mean, require_same_shape
from oxrl.functional.ratios import MAX_LOG_RATIO, geometric_anchor

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


class Tokens(NamedTuple):
    """What a gate decides from, all [B, T], detached and clean but for `logprobs`, which carries the gradient."""

    logprobs: Tensor
    log_ratio: Tensor  # clamped to +-20
    ratio: Tensor
    inside: Tensor  # the clamp did not act; a clamped ratio has no gradient
    advantages: Tensor
    mask: Tensor
    loss_weights: Tensor  # times the correction


def _tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    correction: Tensor | None,
) -> Tokens:
    require_same_shape(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        loss_weights=loss_weights,
        correction=correction,
    )
    logprobs = fill_masked(logprobs, mask)
    raw = logprobs.detach() - fill_masked(old_logprobs.detach(), mask)
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = fill_masked(loss_weights, mask)
    if correction is not None:
        weights = weights * fill_masked(correction.detach(), mask)
    advantages = fill_masked(advantages.detach(), mask)
    return Tokens(logprobs, log_ratio, log_ratio.exp(), raw == log_ratio, advantages, mask, weights)


def _loss(
    tokens: Tokens, value: Tensor, weight: Tensor, *, high: Tensor | None = None, low: Tensor | None = None
) -> LossAndMetrics:
    """Loss with value -sum(loss_weights * value) and gradient -loss_weights * weight * advantages.

    `high` and `low` mark the tokens that were clipped from above and from below.
    """
    push = weight * tokens.advantages * (tokens.logprobs - tokens.logprobs.detach())
    loss = -((value.detach() + push) * tokens.loss_weights).sum()
    nothing = torch.zeros_like(tokens.mask)
    live = tokens.mask & (tokens.advantages != 0)
    flat = torch.where(live, weight, 0.0)
    squares = flat.square().sum()
    metrics = {
        "update/clip_frac_high": masked_mean(nothing if high is None else high, tokens.mask),
        "update/clip_frac_low": masked_mean(nothing if low is None else low, tokens.mask),
        "update/weight_mean": masked_mean(weight, live),
        "update/weight_max": flat.max() if flat.numel() else flat.sum(),
        "update/weight_zero_frac": masked_mean(weight == 0, live),
        "update/weight_ess": flat.sum().square() / (squares * live.sum()).clamp(min=1e-30),
    }
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: Tensor | None = None,
) -> LossAndMetrics:
    """The plain policy gradient: S = A * logprobs, w = 1. No ratio, so it is right for on-policy data only.

    Source: Williams 1992, REINFORCE.
    """
    tokens = _tokens(logprobs, old_logprobs, advantages, mask, loss_weights, correction)
    value = tokens.advantages * tokens.logprobs.detach()
    return _loss(tokens, value, torch.ones_like(tokens.ratio))


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> LossAndMetrics:
    """Clipped surrogate of PPO, shared by GRPO and DAPO.

    S = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A);   with clip_dual c, where A < 0:  max(S, c * A)
    w = 0 if (A > 0 and r > 1 + clip_high) or (A < 0 and (r < 1 - clip_low or r > c)), else r

    The gradient is zero past the bound in the favoured direction only: a token that moved the wrong way is pulled back.
    At a bound itself the token is not clipped.

    Source: arXiv:1707.06347, Eq. 7; separate bounds: DAPO, arXiv:2503.14476; dual clip: arXiv:1912.09729, Eq. 5.

    Args:
        clip_low: offset of the lower bound from 1, in [0, 1).
        clip_high: offset of the upper bound from 1, not negative.
        clip_dual: cap c > 1 of the ratio where A < 0, or None for no cap. Typical 3.
    """
    tokens = _tokens(logprobs, old_logprobs, advantages, mask, loss_weights, correction)
    ratio, advantage = tokens.ratio, tokens.advantages
    high = (advantage > 0) & (ratio > 1 + clip_high)
    low = (advantage < 0) & (ratio < 1 - clip_low)
    bounded = torch.where(high, 1 + clip_high, torch.where(low, 1 - clip_low, ratio))
    dual = torch.zeros_like(high)
    if clip_dual is not None:
        dual = (advantage < 0) & (ratio > clip_dual)
        bounded = torch.where(dual, clip_dual, bounded)
    weight = torch.where(high | low | dual | ~tokens.inside, 0.0, ratio)
    loss, metrics = _loss(tokens, bounded * advantage, weight, high=high, low=low)
    return loss, metrics | {"update/clip_frac_dual": masked_mean(dual, mask)}


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossAndMetrics:
    """Group sequence policy optimization: `ppo_clip` on the row's geometric-mean ratio.

    s = exp(mean over the row of (logprobs - old_logprobs)), carried by every token of the row with its own gradient;
    a row is clipped as a whole. With one advantage per row and `sequence_mean` weights this is GSPO's gradient.

    Source: arXiv:2507.18071, Eq. 5 and 14.

    Args:
        clip_low, clip_high: offsets from 1; two orders of magnitude smaller than PPO's.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    clean = fill_masked(logprobs, mask)
    anchor = geometric_anchor(clean, fill_masked(old_logprobs, mask), mask)
    return ppo_clip(
        clean,
        anchor,
        advantages,
        mask,
        loss_weights,
        correction=correction,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: Tensor | None = None,
    weight_min: float = 0.0,
    weight_max: float = 5.0,
) -> LossAndMetrics:
    """Clipped importance weights: the ratio is capped as a weight, and no token loses its gradient.

    w = clip(r, weight_min, weight_max), detached;  S = w * A * logprobs.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, Eq. 4. The bounds are absolute, not offsets from 1; the paper's lower
    bound is inactive, hence 0.

    Args:
        weight_min: smallest weight, not negative.
        weight_max: largest weight, at least 1.
    """
    tokens = _tokens(logprobs, old_logprobs, advantages, mask, loss_weights, correction)
    weight = tokens.ratio.clamp(weight_min, weight_max)
    value = weight * tokens.advantages * tokens.logprobs.detach()
    live = tokens.advantages != 0
    return _loss(
        tokens,
        value,
        weight,
        high=live & (tokens.ratio > weight_max),
        low=live & (tokens.ratio < weight_min),
    )


# Row.gate -> the function; its numbers are the train fields of PARAMETERS.
GATES: dict[str, Callable[..., LossAndMetrics]] = {
    "policy_gradient": policy_gradient,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
}
