"""Losses on given answers."""

from __future__ import annotations

from torch import Tensor

from oxrl.functional.masks import masked_mean, weighted_sum


def supervised_loss(
    logprobs: Tensor, mask: Tensor, loss_weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the target tokens: loss = -sum_bt loss_weights * logprobs.

    All [B, T], else ValueError: logprobs in nats, the mask of targets, the end-of-turn token among
    them, and the loss weights, usually `token_mean`. Returns a scalar, and `update/nll`, nats per
    target token of this call.
    """
    loss = -weighted_sum(logprobs, mask, loss_weights)
    return loss, {"update/nll": -masked_mean(logprobs.detach(), mask)}
