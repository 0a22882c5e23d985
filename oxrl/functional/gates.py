"""What every policy loss starts and ends with. The contract of a gate is in policy_losses.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.functional.masks import fill_masked, masked_mean, require_same_shape
from oxrl.functional.ratios import MAX_LOG_RATIO

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


def clean_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    correction: Tensor | None,
) -> Tokens:
    """Check shapes, fill masked positions, clamp the log-ratio, and fold the correction into the loss weights."""
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


def surrogate_loss(
    tokens: Tokens,
    value: Tensor,
    weight: Tensor,
    *,
    high: Tensor | None = None,
    low: Tensor | None = None,
    push: Tensor | None = None,
) -> LossAndMetrics:
    """Loss with value -sum(loss_weights * value) and gradient -loss_weights * weight * advantages.

    `high` and `low` mark the tokens that were clipped from above and from below. `push` replaces the term that carries
    the gradient, for the few losses whose gradient is not weight * advantages; its value must be 0.
    """
    if push is None:
        push = weight * tokens.advantages * own_push(tokens)
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


def own_push(tokens: Tokens) -> Tensor:
    """Zero in value, one in its derivative by each token's own logprob."""
    return tokens.logprobs - tokens.logprobs.detach()


class Clipped(NamedTuple):
    """PPO's decision on every token, [B, T]: the bounded ratio, the effective weight, and which bound acted."""

    ratio: Tensor
    weight: Tensor
    high: Tensor
    low: Tensor
    dual: Tensor


def clip_tokens(tokens: Tokens, *, clip_low: float, clip_high: float, clip_dual: float | None = None) -> Clipped:
    """min(r A, clip(r) A) as bounded ratio and weight, with strict inequality at every bound."""
    ratio, advantages = tokens.ratio, tokens.advantages
    high = (advantages > 0) & (ratio > 1 + clip_high)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    dual = torch.zeros_like(high) if clip_dual is None else (advantages < 0) & (ratio > clip_dual)
    bounded = torch.where(high, 1 + clip_high, torch.where(low, 1 - clip_low, ratio))
    bounded = bounded if clip_dual is None else torch.where(dual, clip_dual, bounded)
    weight = torch.where(high | low | dual | ~tokens.inside, 0.0, ratio)
    return Clipped(bounded, weight, high, low, dual)
