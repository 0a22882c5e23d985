"""The policy losses of most runs: the plain ratio, and PPO's clip of it.

Their tensors and what they return are those of every gate (gates.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.gates import Decision, Gate, Tokens, clean, finish
from oxrl.functional.masks import LossAndMetrics, OptionalTensor
from oxrl.functional.ratios import geometric_anchor
from oxrl.tables.numbers import (
    CLIP_DUAL,
    CLIP_HIGH,
    CLIP_LOW,
    GEOMETRIC_CLIP_HIGH,
    GEOMETRIC_CLIP_LOW,
)


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
