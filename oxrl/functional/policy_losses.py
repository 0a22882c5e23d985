"""The common policy losses, and `GATES`, which names them all. Arguments and returns: gates.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oxrl.functional.gates import Decision, LossAndMetrics, Tokens, clipped, gate
from oxrl.functional.masks import fill_masked, require_same_shape
from oxrl.functional.ratios import geometric_anchor
from oxrl.functional.soft_gates import dppo_kl, dppo_tv, gmpo, proximal, rgpo_like, sapo, vespo
from oxrl.functional.vocabulary_gates import clip_cov, dppo_topk_kl, dppo_topk_tv, kl_cov, rspo, simko


@gate
def policy_gradient(tokens: Tokens) -> Decision:
    """The plain policy gradient: S = A * logprobs, w = 1. No ratio, so it is right for on-policy data only.

    Source: Williams 1992, REINFORCE.
    """
    return Decision(tokens.advantages * tokens.now, torch.ones_like(tokens.ratio))


@gate
def ppo_clip(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None
) -> Decision:
    """Clipped surrogate of PPO, shared by GRPO and DAPO.

    S = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A);   with clip_dual c, where A < 0:  max(S, c * A)
    w = 0 if (A > 0 and r > 1 + clip_high) or (A < 0 and (r < 1 - clip_low or r > c)), else r

    The gradient is zero past the bound in the favoured direction only: a token that moved the wrong way is pulled back.
    At a bound itself the token is not clipped.
    Source: arXiv:1707.06347, Eq. 7; separate bounds: DAPO, arXiv:2503.14476; dual clip, typically 3: arXiv:1912.09729.
    """
    return clipped(tokens, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)


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
    Source: arXiv:2507.18071, Eq. 5 and 14. The bounds are two orders of magnitude smaller than PPO's.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    clean = fill_masked(logprobs, mask)
    anchor = geometric_anchor(clean, fill_masked(old_logprobs, mask), mask)
    numbers = {"correction": correction, "clip_low": clip_low, "clip_high": clip_high}
    return ppo_clip(clean, anchor, advantages, mask, loss_weights, **numbers)


@gate
def cispo(tokens: Tokens, *, weight_min: float = 0.0, weight_max: float = 5.0) -> Decision:
    """Clipped importance weights: the ratio is capped as a weight, and no token loses its gradient.

    w = clip(r, weight_min, weight_max), detached;  S = w * A * logprobs.
    Source: CISPO, MiniMax-M1, arXiv:2506.13585, Eq. 4. The bounds are absolute, not offsets from 1; the paper's lower
    bound is inactive, hence 0.
    """
    weight, live = tokens.ratio.clamp(weight_min, weight_max), tokens.advantages != 0
    high, low = live & (tokens.ratio > weight_max), live & (tokens.ratio < weight_min)
    return Decision(weight * tokens.advantages * tokens.now, weight, high, low)


# Row.gate -> the function; its numbers are the train fields of PARAMETERS. A gate that reads further tensors takes them
# by keyword; its needs are in algorithms.NEEDS.
GATES: dict[str, Callable[..., LossAndMetrics]] = {
    "policy_gradient": policy_gradient,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "sapo": sapo,
    "rgpo_like": rgpo_like,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dppo_topk_tv": dppo_topk_tv,
    "dppo_topk_kl": dppo_topk_kl,
    "vespo": vespo,
    "proximal": proximal,
    "gmpo": gmpo,
    "rspo": rspo,
    "simko": simko,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
