"""The KL to the reference: a term of the loss, or taken off the rewards. Imported where one is."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from oxrl.functional.kl import KLS, add_kl_to_rewards, kl_k3_ratio
from oxrl.functional.masks import weighted_sum
from oxrl.types import PolicyBatch, RolloutBatch


def loss_kl(
    logprobs: Tensor, ref_logprobs: Tensor, batch: PolicyBatch, *, name: str, kl_coeff: float
) -> Tensor:
    """A term of the loss, a scalar: kl_coeff times the weighted sum of every token's KL.

    Args:
        logprobs, ref_logprobs: [B, T] nats, of the policy and of the reference.
        batch: what the update reads.
        name: of the estimator, a key of `KLS`.
        kl_coeff: of the term.
    """
    mask = batch.inputs.response_mask
    if name == "loss_k3_ratio":  # it measures its ratio against the sampler
        kl = kl_k3_ratio(logprobs, ref_logprobs, mask, batch.rollout_logprobs)
    else:
        kl = KLS[name](logprobs, ref_logprobs, mask)
    return kl_coeff * weighted_sum(kl, mask, batch.loss_weights)


def subtract_kl(
    rollouts: RolloutBatch, old: Tensor | None, ref: Tensor, *, kl_coeff: float
) -> RolloutBatch:
    """The rollouts with kl_coeff times the KL to the reference taken off their rewards.

    Args:
        old: [B, T] nats of the policy before the update; None: those of the sampler.
        ref: [B, T] nats of the reference.
        kl_coeff: as it is steered.
    """
    sampled = rollouts.rollout_logprobs if old is None else old
    rewards, token_rewards = add_kl_to_rewards(
        rollouts.rewards,
        rollouts.token_rewards,
        sampled,
        ref,
        rollouts.inputs.response_mask,
        kl_coeff=kl_coeff,
    )
    return replace(rollouts, rewards=rewards, token_rewards=token_rewards)
