"""Off-policy corrections: what to do when the sampler's policy is not the trainer's.

rho = exp(old_logprobs - rollout_logprobs) compares the trainer's weights at the start of the step
with whatever sampled the token: other kernels, other precision, or older weights. A correction
turns rho into a detached weight per token that multiplies the policy term. Loss weights are not
touched: a rejected token keeps its share of the denominator.

`correction_level` says whose ratio is judged: the token's, the whole row's product, or the row's
geometric mean. Bounds are on rho itself, absolute and inclusive.

Args of every correction: old_logprobs and rollout_logprobs [B, T] nats, of the trainer at the start
of the step and of the sampler; mask [B, T] bool, trained tokens; ValueError where shapes differ.
`drop_drifted_failures` alone reads the current policy instead of that at the start of the step.
Returns weights [B, T], 0 where masked.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from oxrl.functional.masks import broadcast, fill_masked, masked_mean, require_same_shape
from oxrl.functional.ratios import importance_ratio
from oxrl.tables.numbers import (
    CORRECTION_K3_MAX,
    CORRECTION_LEVEL,
    CORRECTION_MAX,
    CORRECTION_MIN,
    CORRECTION_VETO,
    DRIFT_MAX,
    REJECT_LEVEL,
    REJECT_MAX,
    REJECT_MIN,
    SECOND_MOMENT_MAX,
    Level,
)


class Correction(Protocol):
    """A cell of `CORRECTIONS`; its numbers, and the advantages where it reads them, by keyword."""

    def __call__(
        self,
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        mask: Tensor,
        /,
        *args: Any,
        **further: Any,
    ) -> Tensor:
        """Compute each token's factor on the policy term, as the sampler is not the trainer.

        Args:
            logprobs: [B, T] nats, of the trainer at the start of the step; for one cell, of now.
            rollout_logprobs: [B, T] nats, as the sampler itself said.
            mask: [B, T] bool, trained tokens.
            args: none; they let type checkers accept what a cell takes besides.
            further: numbers of the cell, and the advantages where it reads them.

        Returns:
            [B, T], detached; 0 where a token is rejected or masked.

        Raises:
            ValueError: shapes differ.
        """
        ...


def truncate_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    correction_level: Level = CORRECTION_LEVEL.default,
    correction_max: float = CORRECTION_MAX.default,
) -> Tensor:
    """Truncated importance sampling: biased low, of bounded variance.

    weight = min(rho, correction_max)

    Args:
        old_logprobs, rollout_logprobs, mask: [B, T], as in the module's docstring.
        correction_level: whose ratio is judged.
        correction_max: largest weight.

    Returns:
        Weights [B, T].

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
    correction_level: Level = CORRECTION_LEVEL.default,
    correction_min: float = CORRECTION_MIN.default,
    correction_max: float = CORRECTION_MAX.default,
) -> Tensor:
    """Masked importance sampling (IcePop): the ratio inside an interval, nothing outside it.

    weight = rho where correction_min <= rho <= correction_max, else 0

    Args:
        old_logprobs, rollout_logprobs, mask: [B, T], as in the module's docstring.
        correction_level: whose ratio is judged.
        correction_min, correction_max: bounds of rho.

    Returns:
        Weights [B, T].

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
    correction_level: Level = REJECT_LEVEL.default,
    correction_min: float = REJECT_MIN.default,
    correction_max: float = REJECT_MAX.default,
) -> Tensor:
    """Rejection sampling: tokens whose ratio lies outside an interval are dropped.

    weight = 1 where correction_min <= rho <= correction_max, else 0

    Args:
        old_logprobs, rollout_logprobs, mask: [B, T], as in the module's docstring.
        correction_level: whose ratio is judged.
        correction_min, correction_max: bounds of rho.

    Returns:
        Weights [B, T], 0 or 1.

    Source: Liu et al. 2025, "When speed kills stability"; bounds of verl's geometric preset, here
    on rho itself.
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask, correction_level=correction_level)
    return fill_masked((rho >= correction_min) & (rho <= correction_max), mask)


def reject_k3(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    correction_k3_max: float = CORRECTION_K3_MAX.default,
) -> Tensor:
    """Rows that drifted too far on average are dropped, however long they are.

    weight = 1 where the row's mean of rho - 1 - log rho is at most correction_k3_max, else 0

    Args:
        old_logprobs, rollout_logprobs, mask: [B, T], as in the module's docstring.
        correction_k3_max: largest mean, nats per token.

    Returns:
        Weights [B, T], 0 or 1.
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask)
    k3 = rho - 1 - rho.log()
    near = masked_mean(k3, mask, dim=1) <= correction_k3_max
    return broadcast(near, mask)


def veto_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    correction_veto: float = CORRECTION_VETO.default,
) -> Tensor:
    """One impossible token spoils its row.

    weight = 0 for the whole row if any of its tokens has rho < correction_veto, else 1

    Args:
        old_logprobs, rollout_logprobs, mask: [B, T], as in the module's docstring.
        correction_veto: smallest rho.

    Returns:
        Weights [B, T], 0 or 1.

    Source: slime and verl, catastrophic-token veto.
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask)
    possible = ((rho >= correction_veto) | ~mask).all(1)
    return broadcast(possible, mask)


def drop_drifted_failures(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    drift_max: float = DRIFT_MAX.default,
) -> Tensor:
    """Drops bad responses that the current policy no longer gives: they have nothing more to teach.

    weight = 0 where A < 0 and the row's mean of rollout_logprobs - logprobs is above drift_max,
             else 1

    The drift is that of the weights being updated, so it is judged anew in every update of a
    rollout batch, and with the sampler's own logprobs, so it counts other kernels as well.

    Args:
        logprobs: [B, T] nats of the current policy, detached here.
        rollout_logprobs, mask: [B, T], as in the module's docstring.
        advantages: [B, T].
        drift_max: largest mean, nats per token.

    Returns:
        Weights [B, T], 0 or 1.

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556; TRL's
    `get_off_policy_mask`.
    """
    require_same_shape(
        logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages, mask=mask
    )
    moved = fill_masked(rollout_logprobs, mask) - fill_masked(logprobs.detach(), mask)
    drifted = masked_mean(moved, mask, dim=1) > drift_max
    failed = fill_masked(advantages, mask) < 0
    kept = mask & ~(failed & drifted[:, None])
    return kept.to(moved.dtype)


def second_moment_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    second_moment_max: float = SECOND_MOMENT_MAX.default,
) -> Tensor:
    """Drops the tokens that moved farthest, until the others are near enough on average.

    weight = 0 for the largest (log rho)^2, until the mean over the others is below
    second_moment_max; at least one token survives

    Args:
        old_logprobs, rollout_logprobs, mask: [B, T] of the whole optimizer step, never of a
            micro-batch.
        second_moment_max: bound of the mean.

    Returns:
        Weights [B, T], 0 or 1.

    Source: M2PO, arXiv:2510.01161.
    """
    rho = importance_ratio(old_logprobs, rollout_logprobs, mask)
    squares, order = rho.log().square()[mask].double().sort()
    counts = torch.arange(1, len(squares) + 1, device=squares.device)
    kept = (squares.cumsum(0) / counts < second_moment_max) | (counts == 1)
    weights = torch.zeros_like(rho)
    weights[tuple(mask.nonzero()[order].T)] = kept.to(rho.dtype)
    return weights


# Row.correction -> its function. "none" is not listed: the correction is then None. All but
# `second_moment` decide row by row, so micro-batches cannot change them.
CORRECTIONS: dict[str, Correction] = {
    "truncate": truncate_weights,
    "mask": mask_weights,
    "reject": reject_weights,
    "reject_k3": reject_k3,
    "veto": veto_weights,
    "drop_drifted_failures": drop_drifted_failures,
    "second_moment": second_moment_mask,
}
