"""What every policy loss has in common. A gate is written as a rule: what it decides about clean tokens.

    gate(logprobs, old_logprobs, advantages, mask, loss_weights, *, correction=None, <numbers>) -> (loss, metrics)
    loss = -sum_bt  correction * loss_weights * S(r, A)          r = exp(logprobs - old_logprobs)

A rule gives the value S of the surrogate and the effective weight w = (dS / d logprobs) / A of each token. `gate` makes
the public function of it: a scalar whose value is S and whose gradient is exactly w * A, whatever torch does at ties of
min, max and clamp. Row-level ratios come in through `old_logprobs` (see ratios.py).

Args of every gate:
    logprobs: [B, T] nats, token-aligned, current policy. The gradient flows here only.
    old_logprobs: [B, T] nats, the policy that the ratio is measured against; detached.
    advantages: [B, T]; detached.
    mask: [B, T] bool, trained tokens. Every other position may hold anything, NaN included.
    loss_weights: [B, T], normalised over the global batch (weights.py).
    correction: [B, T] or None, multiplies the policy term only (corrections.py); detached.
    Further numbers, and tensors where a rule reads more, by keyword.

Returns of every gate: scalar loss to minimise in at least float32, and detached scalar metrics over this call's tokens.
Raises of every gate: ValueError when shapes differ.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oxrl.functional.masks import fill_masked, masked_mean, require_same_shape
from oxrl.functional.ratios import MAX_LOG_RATIO

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


class Tokens(NamedTuple):
    """What a rule decides from, all [B, T], detached and clean but for `logprobs`, which carries the gradient."""

    logprobs: Tensor
    log_ratio: Tensor  # clamped to +-20
    ratio: Tensor
    inside: Tensor  # the clamp did not act; a clamped ratio has no gradient
    advantages: Tensor
    mask: Tensor
    loss_weights: Tensor  # times the correction

    @property
    def now(self) -> Tensor:
        """The current logprobs without gradient."""
        return self.logprobs.detach()

    @property
    def own_push(self) -> Tensor:
        """Zero in value, one in its derivative by each token's own logprob."""
        return self.logprobs - self.now


class Decision(NamedTuple):
    """What a rule says of every token, [B, T], detached but for `push`.

    `value` is S, `weight` w; `high` and `low` mark tokens clipped from above and below. `push` replaces the term that
    carries the gradient, w * A * own_push, for the few losses whose gradient is another; its value must be 0.
    """

    value: Tensor
    weight: Tensor
    high: Tensor | None = None
    low: Tensor | None = None
    push: Tensor | None = None
    further: Mapping[str, Tensor] = MappingProxyType({})  # per-token metrics by key, averaged


def clean_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    correction: Tensor | None,
) -> Tokens:
    """Check shapes, fill masked positions, clamp the log-ratio, and fold the correction into the loss weights."""
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    require_same_shape(mask=mask, loss_weights=loss_weights, correction=correction)
    logprobs = fill_masked(logprobs, mask)
    raw = logprobs.detach() - fill_masked(old_logprobs.detach(), mask)
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = fill_masked(loss_weights, mask)
    if correction is not None:
        weights = weights * fill_masked(correction.detach(), mask)
    advantages = fill_masked(advantages.detach(), mask)
    return Tokens(logprobs, log_ratio, log_ratio.exp(), raw == log_ratio, advantages, mask, weights)


def surrogate_loss(tokens: Tokens, decision: Decision) -> LossAndMetrics:
    """Loss with value -sum(loss_weights * value) and gradient -loss_weights * weight * advantages."""
    weight, nothing = decision.weight, torch.zeros_like(tokens.mask)
    push = weight * tokens.advantages * tokens.own_push if decision.push is None else decision.push
    loss = -((decision.value.detach() + push) * tokens.loss_weights).sum()
    live = tokens.mask & (tokens.advantages != 0)
    flat = torch.where(live, weight, 0.0)
    squares = flat.square().sum()
    metrics = {
        "update/clip_frac_high": masked_mean(nothing if decision.high is None else decision.high, tokens.mask),
        "update/clip_frac_low": masked_mean(nothing if decision.low is None else decision.low, tokens.mask),
        "update/weight_mean": masked_mean(weight, live),
        "update/weight_max": flat.max() if flat.numel() else flat.sum(),
        "update/weight_zero_frac": masked_mean(weight == 0, live),
        "update/weight_ess": flat.sum().square() / (squares * live.sum()).clamp(min=1e-30),
    }
    metrics |= {name: masked_mean(values, tokens.mask) for name, values in decision.further.items()}
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def gate(rule: Callable[..., Decision]) -> Callable[..., LossAndMetrics]:
    """The policy loss of `rule(tokens, *, <numbers>)`, with the signature in the module docstring."""

    def loss(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        loss_weights: Tensor,
        *,
        correction: Tensor | None = None,
        **numbers: Any,
    ) -> LossAndMetrics:
        tokens = clean_tokens(logprobs, old_logprobs, advantages, mask, loss_weights, correction)
        return surrogate_loss(tokens, rule(tokens, **numbers))

    # help(ppo_clip) shows the tensors a caller passes, not the rule's `tokens`.
    shared = list(inspect.signature(loss).parameters.values())[:-1]
    numbers = list(inspect.signature(rule).parameters.values())[1:]
    functools.update_wrapper(loss, rule)
    loss.__signature__ = inspect.Signature([*shared, *numbers], return_annotation="LossAndMetrics")  # pyright: ignore
    return loss


def clipped(tokens: Tokens, *, clip_low: float, clip_high: float, clip_dual: float | None = None) -> Decision:
    """PPO's min(r A, clip(r) A), and max(., clip_dual A) where A < 0; at a bound itself a token is not clipped."""
    ratio, advantages = tokens.ratio, tokens.advantages
    high = (advantages > 0) & (ratio > 1 + clip_high)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    cap = torch.inf if clip_dual is None else clip_dual
    dual = (advantages < 0) & (ratio > cap)
    bounded = torch.where(high, 1 + clip_high, torch.where(low, 1 - clip_low, torch.where(dual, cap, ratio)))
    weight = torch.where(high | low | dual | ~tokens.inside, 0.0, ratio)
    return Decision(bounded * advantages, weight, high, low, further={"update/clip_frac_dual": dual})
