"""The frame of every policy loss, and the losses of most runs: the plain ratio, and PPO's clip.

    gate(logprobs, old_logprobs, advantages, mask, loss_weights, *, correction=None, <numbers>)
    loss = -sum_bt  correction * loss_weights * S(r, A)          r = exp(logprobs - old_logprobs)

A gate begins with `clean` and ends with `finish`. In between it decides two things about every
token: the value S of the surrogate and the effective weight w = (dS / d logprobs) / A. `finish`
makes of it a scalar whose value is S and whose gradient is exactly w * A, whatever torch does at
ties of min, max and clamp. Row-level ratios come in through `old_logprobs` (see ratios.py).

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
from oxrl.functional.ratios import MAX_LOG_RATIO, geometric_anchor
from oxrl.tables.numbers import (
    CLIP_DUAL,
    CLIP_HIGH,
    CLIP_LOW,
    GEOMETRIC_CLIP_HIGH,
    GEOMETRIC_CLIP_LOW,
)


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


class LossInputs(NamedTuple):
    """The numbers that the policy loss of tokens is computed from, its ratio and correction too.

    logprobs: [B, T] nats, now, with gradient. old: of the policy that the update starts from.
    sampler: as the sampler said. advantages, mask, loss_weights: as of a gate.
    """

    logprobs: Tensor
    old: Tensor
    sampler: Tensor
    advantages: Tensor
    mask: Tensor
    loss_weights: Tensor


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
        "update/clip_frac_high": nothing if decision.high is None else decision.high,
        "update/clip_frac_low": nothing if decision.low is None else decision.low,
        **decision.further,
    }
    metrics = {name: masked_mean(x.detach(), tokens.mask) for name, x in per_token.items()}
    total = weight.sum()
    squares = weight.square().sum() * live.sum()
    return metrics | {
        "update/weight_mean": masked_mean(weight, live),
        "update/weight_max": weight.max() if weight.numel() else total,
        "update/weight_zero_frac": masked_mean(weight == 0, live),
        "update/weight_ess": total.square() / squares.clamp(min=1e-30),
    }


def policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
) -> LossAndMetrics:
    """Plain policy gradient, without a ratio: right for on-policy data only.

    S = A * logprobs;  w = 1

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: Williams 1992, REINFORCE.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    value = tokens.advantages * tokens.now
    decision = Decision(value, torch.ones_like(tokens.ratio))
    return finish(tokens, decision, loss_weights, correction)


def importance_sampling(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
) -> LossAndMetrics:
    """The policy gradient of samples of another policy: the ratio as it is, without a clip.

    S = r * A;  w = r

    What keeps the ratio near 1 has to come from elsewhere, as M2PO's mask does (corrections.py).

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: M2PO, arXiv:2510.01161; conservative policy iteration, PPO's Eq. 6, arXiv:1707.06347.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    weight = torch.where(tokens.inside, tokens.ratio, 0.0)
    decision = Decision(tokens.ratio * tokens.advantages, weight)
    return finish(tokens, decision, loss_weights, correction)


def clipped(
    tokens: Tokens, clip_low: float, clip_high: float, clip_dual: float | None = None
) -> Decision:
    """Decide for every token as `ppo_clip` does: its value, its weight, and what is clipped.

    Args:
        tokens: clean, with their ratios and advantages.
        clip_low, clip_high, clip_dual: as of `ppo_clip`.
    """
    ratio = tokens.ratio
    positive = tokens.advantages > 0
    negative = tokens.advantages < 0
    cap = torch.inf
    if clip_dual is not None:
        cap = clip_dual
    high = positive & (ratio > 1 + clip_high)
    low = negative & (ratio < 1 - clip_low)
    dual = negative & (ratio > cap)
    bounded = torch.where(dual, cap, ratio)
    bounded = torch.where(low, 1 - clip_low, bounded)
    bounded = torch.where(high, 1 + clip_high, bounded)
    weight = torch.where(high | low | dual | ~tokens.inside, 0.0, ratio)
    further = {"update/clip_frac_dual": dual}
    return Decision(bounded * tokens.advantages, weight, high, low, further=further)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    clip_low: float = CLIP_LOW.default,
    clip_high: float = CLIP_HIGH.default,
    clip_dual: float | None = CLIP_DUAL.default,
) -> LossAndMetrics:
    """Clipped surrogate of PPO, shared by GRPO and DAPO.

    S = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
        with clip_dual c, where A < 0: max(S, c * A)
    w = 0 if (A > 0 and r > 1 + clip_high) or (A < 0 and (r < 1 - clip_low or r > c)), else r

    The gradient is zero past the bound in the favored direction only: a token that moved the wrong
    way is pulled back. At a bound itself the token is not clipped.

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        clip_low, clip_high: how far r may move from 1, offsets.
        clip_dual: the largest r of a token with A < 0, typically 3; None for no such bound.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: arXiv:1707.06347, Eq. 7; separate bounds: DAPO, arXiv:2503.14476; dual clip:
    arXiv:1912.09729.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    decision = clipped(tokens, clip_low, clip_high, clip_dual)
    return finish(tokens, decision, loss_weights, correction)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    clip_low: float = GEOMETRIC_CLIP_LOW.default,
    clip_high: float = GEOMETRIC_CLIP_HIGH.default,
) -> LossAndMetrics:
    """Group sequence policy optimization: `ppo_clip` on the row's geometric-mean ratio.

    s = exp(mean over the row of (logprobs - old_logprobs))

    Every token of the row carries s with its own gradient; a row is clipped as a whole. With one
    advantage per row and `sequence_mean` weights this is GSPO's gradient. The row `gspo` of the
    table is the same: ratio "geometric" and gate "ppo_clip".

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        clip_low, clip_high: offsets of s from 1, two orders of magnitude smaller than PPO's.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: arXiv:2507.18071, Eq. 5 and 14.
    """
    return ppo_clip(
        logprobs,
        geometric_anchor(logprobs, old_logprobs, mask),
        advantages,
        mask,
        loss_weights,
        correction=correction,
        clip_low=clip_low,
        clip_high=clip_high,
    )


CLIPPED_GATES: dict[str, Gate] = {
    "policy_gradient": policy_gradient,
    "importance_sampling": importance_sampling,
    "ppo_clip": ppo_clip,
}
