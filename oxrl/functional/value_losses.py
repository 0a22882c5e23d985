"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.masks import (
    LossAndMetrics,
    fill_masked,
    masked_mean,
    require_same_shape,
    weighted_sum,
)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    value_clip: float | None = None,
) -> LossAndMetrics:
    """Squared error of the value, with PPO's pessimistic clip around the old value.

    loss = sum_bt loss_weights * 1/2 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

    The gradient is zero where the clipped branch is the larger one: the value already moved c away
    from V_old, and moving on would not be seen by the loss.

    Args:
        values: [B, T]; the only tensor with a gradient.
        old_values: [B, T], before the update.
        returns: [B, T], advantages + old values, never whitened.
        mask: [B, T] bool, trained tokens.
        loss_weights: [B, T], usually `token_mean`.
        value_clip: c > 0 in units of the value; None for no clip.

    Returns:
        Scalar loss, and `value/clip_frac`, the fraction without a gradient.

    Raises:
        ValueError: shapes differ.

    Source: PPO's reference implementation; arXiv:2005.12729, section 3.
    """
    require_same_shape(
        values=values, old_values=old_values, returns=returns, mask=mask, loss_weights=loss_weights
    )
    values = fill_masked(values, mask)
    returns = fill_masked(returns.detach(), mask)
    error = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if value_clip is not None:
        old_values = fill_masked(old_values.detach(), mask)
        moved = values.detach() - old_values
        outside = moved.abs() > value_clip  # within the bound both errors are one, rounded twice
        bounded = old_values + moved.clamp(-value_clip, value_clip)
        bounded_error = (bounded - returns).square()
        clipped = outside & (bounded_error > error.detach())
        error = torch.where(clipped, bounded_error, error)
    metrics = {"value/clip_frac": masked_mean(clipped, mask).detach()}
    return weighted_sum(error / 2, mask, loss_weights), metrics
