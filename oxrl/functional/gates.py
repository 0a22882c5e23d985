"""What every policy loss has in common. A gate is written as a rule: what it decides about clean
tokens.

    gate(logprobs, old_logprobs, advantages, mask, loss_weights, *, correction=None, <numbers>) ->
    (loss, metrics)
    loss = -sum_bt  correction * loss_weights * S(r, A)          r = exp(logprobs - old_logprobs)

A rule gives the value S of the surrogate and the effective weight w = (dS / d logprobs) / A of each
token. `gate` makes
the public function of it: a scalar whose value is S and whose gradient is exactly w * A, whatever
torch does at ties of min, max and clamp. Row-level ratios come in through `old_logprobs` (see
ratios.py).

Args of every gate, all [B, T], else ValueError; the gradient flows to `logprobs` only:
    logprobs, old_logprobs: nats, token-aligned, of the current policy and of the one the ratio is
    measured against.
    mask: bool, trained tokens. Every other position may hold anything, NaN included.
    loss_weights: normalized over the global batch (weights.py).
    correction: or None, multiplies the policy term only (corrections.py).
    Further numbers, and tensors where a rule reads more, by keyword.

Returns of every gate: scalar loss to minimize in at least float32, and detached scalar metrics over
this call's tokens.
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
    """What a rule decides from, all [B, T], detached and clean but for `logprobs`, which carries
    the gradient.
    """

    logprobs: Tensor
    log_ratio: Tensor  # clamped to +-20
    ratio: Tensor
    inside: Tensor  # the clamp did not act; a clamped ratio has no gradient
    advantages: Tensor
    mask: Tensor

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

    `value` is S, `weight` w; `high` and `low` mark tokens clipped from above and below. `push`
    replaces the term that carries the gradient, w * A * own_push, for the few losses whose gradient
    is another; its value must be 0.
    """

    value: Tensor
    weight: Tensor
    high: Tensor | None = None
    low: Tensor | None = None
    push: Tensor | None = None
    further: Mapping[str, Tensor] = MappingProxyType({})  # per-token metrics by key, averaged


def gate(rule: Callable[..., Decision]) -> Callable[..., LossAndMetrics]:
    """The policy loss of `rule(tokens, *, <numbers>)`, with the signature in the module
    docstring.
    """

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
        require_same_shape(
            logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask
        )
        require_same_shape(mask=mask, loss_weights=loss_weights, correction=correction)
        logprobs, weights = fill_masked(logprobs, mask), fill_masked(loss_weights, mask)
        if correction is not None:
            weights = weights * fill_masked(correction.detach(), mask)
        raw = logprobs.detach() - fill_masked(old_logprobs.detach(), mask)
        log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantages = fill_masked(advantages.detach(), mask)
        tokens = Tokens(logprobs, log_ratio, log_ratio.exp(), raw == log_ratio, advantages, mask)
        decision = rule(tokens, **numbers)
        push = (
            decision.weight * advantages * tokens.own_push
            if decision.push is None
            else decision.push
        )
        return -((decision.value.detach() + push) * weights).sum(), _metrics(tokens, decision)

    # help(ppo_clip) shows the tensors a caller passes, not the rule's `tokens`.
    shared = list(inspect.signature(loss).parameters.values())[:-1]
    numbers = list(inspect.signature(rule).parameters.values())[1:]
    functools.update_wrapper(loss, rule)
    loss.__signature__ = inspect.Signature([*shared, *numbers], return_annotation="LossAndMetrics")  # pyright: ignore
    return loss


def _metrics(tokens: Tokens, decision: Decision) -> dict[str, Tensor]:
    live, nothing = tokens.mask & (tokens.advantages != 0), torch.zeros_like(tokens.mask)
    weight = torch.where(live, decision.weight, 0.0)
    per_token = {
        "update/clip_frac_high": nothing if decision.high is None else decision.high,
        "update/clip_frac_low": nothing if decision.low is None else decision.low,
        **decision.further,
    }
    metrics = {name: masked_mean(values, tokens.mask) for name, values in per_token.items()} | {
        "update/weight_mean": masked_mean(weight, live),
        "update/weight_max": weight.max() if weight.numel() else weight.sum(),
        "update/weight_zero_frac": masked_mean(weight == 0, live),
        "update/weight_ess": weight.sum().square()
        / (weight.square().sum() * live.sum()).clamp(min=1e-30),
    }
    return {name: metric.detach() for name, metric in metrics.items()}
