"""Off-policy corrections: what to do when the sampler's policy is not the trainer's.

rho = exp(old_logprobs - rollout_logprobs) compares the trainer's weights at the start of the step with whatever sampled
the token: other kernels, other precision, or older weights. A correction turns rho into a detached weight per token
that multiplies the policy term. Loss weights are not touched: a rejected token keeps its share of the denominator.

`correction_level` says whose ratio is judged: the token's, the whole row's product, or the row's geometric mean.
Bounds are on rho itself, absolute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from oxrl.functional.masks import fill_masked, require_same_shape
from oxrl.functional.ratios import LEVELS, MAX_LOG_RATIO

Level = Literal["token", "sequence", "geometric"]


def importance_ratio(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, correction_level: Level
) -> Tensor:
    """rho at `correction_level`, [B, T], 1 where masked; its logarithm is clamped to +-20. Detached."""
    require_same_shape(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    log_rho = fill_masked(old_logprobs.detach(), mask) - fill_masked(rollout_logprobs.detach(), mask)
    return LEVELS[correction_level](log_rho, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncate_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    correction_level: Level = "token",
    correction_max: float = 2.0,
) -> Tensor:
    """Truncated importance sampling: min(rho, correction_max). Biased low, of bounded variance.

    Source: Ionides 2008; TIS, Yao et al. 2025 ("Your efficient RL framework secretly brings you off-policy training").

    Args:
        old_logprobs: [B, T] nats, the trainer's at the start of the step.
        rollout_logprobs: [B, T] nats, the sampler's.
        mask: [B, T] bool, trained tokens.
        correction_level: token, sequence or geometric.
        correction_max: upper bound on rho, absolute.

    Returns:
        [B, T] weights, detached, 0 where masked.

    Raises:
        ValueError: shapes differ.
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask, correction_level=correction_level)
    return fill_masked(rho.clamp(max=correction_max), mask)


def mask_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    correction_level: Level = "token",
    correction_min: float = 0.5,
    correction_max: float = 2.0,
) -> Tensor:
    """Masked importance sampling (IcePop): rho inside [correction_min, correction_max], 0 outside.

    Source: IcePop, Ring-1T, arXiv:2510.18855.

    Args, Returns and Raises: as `truncate_weights`; both bounds are absolute and inclusive.
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask, correction_level=correction_level)
    kept = mask & (rho >= correction_min) & (rho <= correction_max)
    return torch.where(kept, rho, 0.0)


# Row.correction -> (old_logprobs, rollout_logprobs, mask, **numbers of PARAMETERS) -> weights [B, T], detached.
# "none" is not listed: the correction is then None.
CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "truncate": truncate_weights,
    "mask": mask_weights,
}
