"""Off-policy corrections: what to do when the sampler's policy is not the trainer's.

rho = exp(old_logprobs - rollout_logprobs) compares the trainer's weights at the start of the step
with whatever sampled
the token: other kernels, other precision, or older weights. A correction turns rho into a detached
weight per token that multiplies the policy term. Loss weights are not touched: a rejected token
keeps its share of the denominator.

`correction_level` says whose ratio is judged: the token's, the whole row's product, or the row's
geometric mean. Bounds are on rho itself, absolute and inclusive.

Args of every correction: old_logprobs and rollout_logprobs [B, T] nats, of the trainer at the start
of the step and of the sampler; mask [B, T] bool, trained tokens; ValueError where shapes differ.
Returns weights [B, T], 0 where masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from oxrl.functional.masks import fill_masked, masked_mean, require_same_shape
from oxrl.functional.ratios import LEVELS, MAX_LOG_RATIO

Level = Literal["token", "sequence", "geometric"]


def importance_ratio(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    correction_level: Level = "token",
) -> Tensor:
    """rho at `correction_level`, [B, T], 1 where masked; its logarithm is clamped to +-20.
    Detached.
    """
    require_same_shape(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    log_rho = fill_masked(old_logprobs.detach(), mask) - fill_masked(
        rollout_logprobs.detach(), mask
    )
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

    Source: Ionides 2008; TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy training".
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
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask, correction_level=correction_level)
    kept = mask & (rho >= correction_min) & (rho <= correction_max)
    return torch.where(kept, rho, 0.0)


def reject_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    correction_level: Level = "geometric",
    correction_min: float = 0.999,
    correction_max: float = 1.001,
) -> Tensor:
    """Rejection sampling: 1 where rho lies in [correction_min, correction_max], 0 outside.

    Source: Liu et al. 2025, "When speed kills stability"; bounds of verl's geometric preset, here
    on rho itself.
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask, correction_level=correction_level)
    return fill_masked((rho >= correction_min) & (rho <= correction_max), mask)


def reject_k3(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, correction_k3_max: float = 0.01
) -> Tensor:
    """1 for rows whose mean of rho - 1 - log rho is at most correction_k3_max, else 0: no length
    trap.
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask)
    return fill_masked(
        (masked_mean(rho - 1 - rho.log(), mask, dim=1) <= correction_k3_max)[:, None] & mask, mask
    )


def veto_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, correction_veto: float = 1e-4
) -> Tensor:
    """0 for a whole row if any of its tokens has rho < correction_veto, else 1: one impossible
    token spoils the row.

    Source: slime and verl, catastrophic-token veto.
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask)
    return fill_masked(((rho >= correction_veto) | ~mask).all(1)[:, None] & mask, mask)


def drop_drifted_failures(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    drift_max: float = 0.5,
) -> Tensor:
    """0 for rows of mean A < 0 whose mean of rollout_logprobs - old_logprobs is above drift_max,
    else 1.

    A bad response that the current policy no longer gives has nothing more to teach.
    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556.
    """
    require_same_shape(advantages=advantages, mask=mask)
    drift = masked_mean(
        fill_masked(rollout_logprobs, mask) - fill_masked(old_logprobs, mask), mask, dim=1
    )
    dropped = (masked_mean(advantages, mask, dim=1) < 0) & (drift > drift_max)
    return fill_masked(~dropped[:, None] & mask, mask).detach()


def second_moment_mask(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, second_moment_max: float = 0.04
) -> Tensor:
    """Drops the tokens with the largest (log rho)^2 until the mean over the others is below
    second_moment_max.

    Over the whole optimizer step, so it must be given the full batch; at least one token survives.
    Source: M2PO, arXiv:2510.01161.
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask)
    squares, order = rho.log().square()[mask].double().sort()
    counts = torch.arange(1, len(squares) + 1, device=squares.device)
    kept = (squares.cumsum(0) / counts < second_moment_max) | (counts == 1)
    weights = torch.zeros_like(rho)
    weights[tuple(mask.nonzero()[order].T)] = kept.to(rho.dtype)
    return weights


# Row.correction -> (old_logprobs, rollout_logprobs, mask, **numbers of PARAMETERS) -> weights [B,
# T], detached. "none" is not listed: the correction is then None. All but `second_moment` decide
# row by row, so micro-batches cannot change them; `drop_drifted_failures` also takes advantages.
CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "truncate": truncate_weights,
    "mask": mask_weights,
    "reject": reject_weights,
    "reject_k3": reject_k3,
    "veto": veto_weights,
    "drop_drifted_failures": drop_drifted_failures,
    "second_moment": second_moment_mask,
}
