"""Losses on given answers."""

from __future__ import annotations

from torch import Tensor

from oxrl.functional.masks import LossAndMetrics, masked_mean, weighted_sum


def supervised_loss(logprobs: Tensor, mask: Tensor, loss_weights: Tensor) -> LossAndMetrics:
    """Negative log-likelihood of the target tokens.

        loss = -sum_bt loss_weights * logprobs

    Args:
        logprobs: [B, T] nats.
        mask: [B, T] bool, the targets, the end-of-turn token among them.
        loss_weights: [B, T], usually `token_mean`.

    Returns:
        A scalar, and `update/nll`, nats per target token of this call.

    Raises:
        ValueError: shapes differ.
    """
    loss = -weighted_sum(logprobs, mask, loss_weights)
    return loss, {"update/nll": -masked_mean(logprobs.detach(), mask)}
