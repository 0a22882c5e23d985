"""The frame of every policy loss: clean tokens at its beginning, loss and metrics at its end.

    gate(logprobs, old_logprobs, advantages, mask, loss_weights, *, correction=None, <numbers>)
    loss = -sum_bt  correction * loss_weights * S(r, A)          r = exp(logprobs - old_logprobs)

Between `clean` and `finish` a gate decides two things about every token: the value S of the
surrogate and the effective weight w = (dS / d logprobs) / A. `finish` makes of it a scalar whose
value is S and whose gradient is exactly w * A, whatever torch does at ties of min, max and clamp.
Row-level ratios come in through `old_logprobs` (see ratios.py).

Args of every gate, all [B, T], else ValueError; the gradient flows to `logprobs` only:
    logprobs, old_logprobs: nats, token-aligned, of the current policy and of the one the ratio is
        measured against.
    advantages: detached here.
    mask: bool, trained tokens. Every other position may hold anything, NaN included.
    loss_weights: normalized over the global batch (weights.py).
    correction: or None, multiplies the policy term only (corrections.py).
    Further numbers, and tensors where a gate reads more, by keyword.

Returns of every gate: scalar loss to minimize in at least float32, and detached scalar metrics over
this call's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from oxrl.functional.masks import (
    LossAndMetrics,
    OptionalTensor,
    fill_masked,
    masked_mean,
    require_same_shape,
)
from oxrl.functional.ratios import MAX_LOG_RATIO


class Gate(Protocol):
    """A policy loss; what it reads beyond these tensors, numbers and tensors, comes by keyword."""

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        loss_weights: Tensor,
        *args: Any,
        correction: OptionalTensor = None,
        **further: Any,
    ) -> LossAndMetrics:
        """The loss of one micro-batch; see the top of this file.

        Args:
            logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare
                with.
            advantages: [B, T], detached inside.
            mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
            loss_weights: [B, T], normalized over the global batch (weights.py).
            args: none; they let type checkers accept what a cell takes besides.
            correction: [B, T] factor of the policy term; None: 1 (corrections.py).
            further: numbers of the gate, and tensors where it reads more.

        Returns:
            Scalar to minimise, and its metrics.

        Raises:
            ValueError: shapes differ.
        """
        ...


class Tokens(NamedTuple):
    """The clean tensors [B, T] that a gate decides from; all but `logprobs` are detached."""

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
    def old(self) -> Tensor:
        """The logprobs that the ratio is measured against, as far as its clamp lets them."""
        return self.now - self.log_ratio

    @property
    def own_push(self) -> Tensor:
        """Zero in value, one in its derivative by each token's own logprob."""
        return self.logprobs - self.now


class Decision(NamedTuple):
    """A gate's decision about every token, [B, T], detached but for `push`."""

    value: Tensor  # S
    weight: Tensor  # w
    high: OptionalTensor = None  # clipped from above
    low: OptionalTensor = None  # clipped from below
    # In place of the term that carries the gradient, w * A * own_push, for the few losses whose
    # gradient is another; its value must be 0.
    push: OptionalTensor = None
    further: Mapping[str, Tensor] = MappingProxyType({})  # per-token metrics by key, averaged


def clean(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tokens:
    """Fill what is not trained, detach what carries no gradient, and take the ratio.

    Args:
        logprobs, old_logprobs, advantages, mask: [B, T], the gate's own arguments.

    Returns:
        Tokens, 0 where masked (ratio 1).

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask
    )
    logprobs = fill_masked(logprobs, mask)
    # A row-level anchor is float64, and the row's log-ratio is found in it exactly (ratios.py).
    raw = (logprobs.detach() - fill_masked(old_logprobs.detach(), mask)).to(logprobs.dtype)
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = fill_masked(advantages.detach(), mask)
    return Tokens(logprobs, log_ratio, log_ratio.exp(), raw == log_ratio, advantages, mask)


def finish(
    tokens: Tokens, decision: Decision, loss_weights: Tensor, correction: OptionalTensor
) -> LossAndMetrics:
    """Sum what was decided about the tokens into the loss, and measure it.

    Args:
        tokens: of `clean`.
        decision: value and effective weight of every token.
        loss_weights, correction: [B, T], the gate's own arguments.

    Returns:
        The scalar loss; its metrics `update/...`, detached scalars.

    Raises:
        ValueError: shapes differ.
    """
    mask = tokens.mask
    require_same_shape(mask=mask, loss_weights=loss_weights, correction=correction)
    weights = fill_masked(loss_weights, mask)
    if correction is not None:
        weights = weights * fill_masked(correction.detach(), mask)
    push = decision.push
    if push is None:
        push = decision.weight * tokens.advantages * tokens.own_push
    loss = -((decision.value.detach() + push) * weights).sum()
    return loss, _metrics(tokens, decision)


def _metrics(tokens: Tokens, decision: Decision) -> dict[str, Tensor]:
    """Clip fractions of all trained tokens, weights of those whose advantage is not 0."""
    live = tokens.mask & (tokens.advantages != 0)
    weight = torch.where(live, decision.weight, 0.0).detach()
    nothing = torch.zeros_like(tokens.mask)
    per_token = {
        "update/clip_frac_high": nothing,
        "update/clip_frac_low": nothing,
        **decision.further,
    }
    if decision.high is not None:
        per_token["update/clip_frac_high"] = decision.high
    if decision.low is not None:
        per_token["update/clip_frac_low"] = decision.low
    metrics = {name: masked_mean(x.detach(), tokens.mask) for name, x in per_token.items()}
    total = weight.sum()
    squares = weight.square().sum() * live.sum()
    metrics["update/weight_mean"] = masked_mean(weight, live)
    metrics["update/weight_max"] = total
    if weight.numel():
        metrics["update/weight_max"] = weight.max()
    metrics["update/weight_zero_frac"] = masked_mean(weight == 0, live)
    metrics["update/weight_ess"] = total.square() / squares.clamp(min=1e-30)
    return metrics
