"""Pure maths: tensors in, tensors out. No config, no I/O, no devices, no randomness, nothing heavier than torch.

A formula belongs here when it has an equation; whatever needs a model, a file or a setting does not.
"""

from __future__ import annotations

from oxrl.functional.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    gae,
    group_center,
    group_normalize,
    leave_one_out,
    whiten,
)
from oxrl.functional.corrections import CORRECTIONS, mask_weights, truncate_weights
from oxrl.functional.kl import KLS, add_kl_to_rewards, kl_k1, kl_k2, kl_k3, kl_k3_plus
from oxrl.functional.logprobs import logprobs_from_logits
from oxrl.functional.masks import masked_mean, masked_sum, require_same_shape, weighted_sum
from oxrl.functional.policy_losses import GATES, cispo, gspo, policy_gradient, ppo_clip
from oxrl.functional.ratios import RATIOS
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.functional.value_losses import value_loss
from oxrl.functional.weights import WEIGHTS, fixed_length, prompt_mean, sequence_mean, sequence_sum, token_mean

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "GATES",
    "KLS",
    "RATIOS",
    "WEIGHTS",
    "AdvantageInputs",
    "add_kl_to_rewards",
    "cispo",
    "fixed_length",
    "gae",
    "group_center",
    "group_normalize",
    "gspo",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_plus",
    "leave_one_out",
    "logprobs_from_logits",
    "mask_weights",
    "masked_mean",
    "masked_sum",
    "policy_gradient",
    "ppo_clip",
    "prompt_mean",
    "require_same_shape",
    "sequence_mean",
    "sequence_sum",
    "supervised_loss",
    "token_mean",
    "truncate_weights",
    "value_loss",
    "weighted_sum",
    "whiten",
]
