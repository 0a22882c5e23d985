"""Losses on given answers."""

from __future__ import annotations

from torch import Tensor

from oxrl.functional.masks import LossAndMetrics, fill_masked, masked_mean, weighted_sum


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


def dft_loss(logprobs: Tensor, mask: Tensor, loss_weights: Tensor) -> LossAndMetrics:
    """Negative log-likelihood that counts each token by its probability: what the model finds
    impossible teaches little, instead of most.

        loss = -sum_bt loss_weights * p * logprobs,  p = exp(logprobs), detached

    Args:
        logprobs: [B, T] nats.
        mask: [B, T] bool, the targets, the end-of-turn token among them.
        loss_weights: [B, T], usually `token_mean`.

    Returns:
        A scalar, and `update/nll`, nats per target token of this call, each counting alike.

    Raises:
        ValueError: shapes differ.

    Source: Dynamic fine-tuning, arXiv:2508.05629; TRL (trl/trainer/sft_trainer.py, dft_loss).
    """
    p = fill_masked(logprobs.detach(), mask).exp()
    return supervised_loss(logprobs, mask, p * loss_weights)
