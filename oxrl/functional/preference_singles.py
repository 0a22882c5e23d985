"""Preference losses of single completions with a thumb up or down.

A reward is r = beta * (log p - log p_reference), in nats times beta; a loss compares it with a
shift that depends on the whole batch. Metrics: `preference/baseline` (the shift),
`preference/desirable_reward` and `preference/undesirable_reward`, detached means over the rows that
count.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from oxrl.functional.masks import at_least_float32, masked_mean
from oxrl.functional.preference_pairs import LossAndMetrics, filled, weighted_loss
from oxrl.tables.numbers import BCO_BETA, BETA, DESIRABLE_COEFF, UNDESIRABLE_COEFF


def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    loss_weights: Tensor,
    kl_baseline: Tensor,
    *,
    beta: float = BETA.default,
    desirable_coeff: float = DESIRABLE_COEFF.default,
    undesirable_coeff: float = UNDESIRABLE_COEFF.default,
) -> LossAndMetrics:
    """Raise desirable completions above, and push undesirable ones below, what the policy gains.

        loss = c_D sigmoid(z' - r) or, undesirable, c_U sigmoid(r - z'), z' = beta * kl_baseline

    Keep c_D n_D / (c_U n_U) within 1 to 4/3. With a baseline of 0 this is the unpaired form of
    APO-zero.

    Args:
        logprobs, ref_logprobs: [B] nats, summed over the trained tokens.
        desirable: [B] bool.
        loss_weights: [B], 1 / rows of the global batch; 0 leaves a row out.
        kl_baseline: scalar nats, from `kto_baseline`.
        beta: scale of the log ratios, per nat.
        desirable_coeff, undesirable_coeff: c_D and c_U.

    Returns:
        The scalar to minimize, and the metrics of this module.

    Raises:
        ValueError: shapes differ, or `desirable` is not bool.

    Source: arXiv:2402.01306.
    """
    shift = beta * at_least_float32(kl_baseline)
    reward, metrics = _signed_reward(logprobs, ref_logprobs, desirable, loss_weights, shift, beta)
    losses = (-reward).sigmoid()
    losses = torch.where(desirable, desirable_coeff * losses, undesirable_coeff * losses)
    return weighted_loss(losses, loss_weights), metrics


def bco_unpaired(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    loss_weights: Tensor,
    reward_shift: Tensor,
    *,
    beta: float = BCO_BETA.default,
) -> LossAndMetrics:
    """Classify desirable and undesirable completions by their rewards, around the mean reward.

        loss = -log sigmoid(r - d), undesirable -log sigmoid(d - r), d = reward_shift

    Density ratios go into the weights.

    Args:
        logprobs, ref_logprobs: [B] nats, summed over the trained tokens.
        desirable: [B] bool.
        loss_weights: [B], 1 / rows of the global batch; 0 leaves a row out.
        reward_shift: scalar, d, from `bco_reward_shift`.
        beta: scale of the log ratios, per nat.

    Returns:
        The scalar to minimize, and the metrics of this module.

    Raises:
        ValueError: shapes differ, or `desirable` is not bool.

    Source: arXiv:2404.04656.
    """
    reward, metrics = _signed_reward(
        logprobs, ref_logprobs, desirable, loss_weights, reward_shift, beta
    )
    return weighted_loss(-logsigmoid(reward), loss_weights), metrics


def _signed_reward(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    loss_weights: Tensor,
    shift: Tensor,
    beta: float,
) -> LossAndMetrics:
    """Reward above `shift` [B], its sign turned where undesirable; and the metrics."""
    shift = at_least_float32(shift.detach())
    own = filled(logprobs, loss_weights, "logprobs")
    ref = filled(ref_logprobs.detach(), loss_weights, "ref_logprobs")
    rewards = beta * (own - ref)
    if desirable.dtype != torch.bool or desirable.shape != rewards.shape:
        given = f"{desirable.dtype} of shape {tuple(desirable.shape)}"
        raise ValueError(f"desirable must be bool of shape {tuple(rewards.shape)}, got {given}")
    counted = loss_weights != 0
    measured = rewards.detach()
    metrics = {
        "preference/baseline": shift,
        "preference/desirable_reward": masked_mean(measured, desirable & counted),
        "preference/undesirable_reward": masked_mean(measured, ~desirable & counted),
    }
    return torch.where(desirable, rewards - shift, shift - rewards), metrics
