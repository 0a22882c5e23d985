"""Estimators of KL(policy || reference) from the sampled tokens.

With d = logprobs - ref_logprobs: the value of k1 and k3 is unbiased, the gradient of k2 is exact,
the gradient of k1 is pure noise and that of k3 belongs to the other direction (arXiv:2510.01555).
`kl_k3_plus` takes the best of both and is what a loss should use; k1 belongs into the reward.

Args of every estimator: logprobs and ref_logprobs [B, T] nats; mask [B, T] bool, trained tokens, or
None for all. Returns [B, T] nats, 0 where masked whatever stands there. ValueError where shapes
differ.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from oxrl.functional.masks import OptionalTensor, fill_masked, require_same_shape
from oxrl.functional.ratios import MAX_LOG_RATIO

MAX_K3 = 10.0


class Estimator(Protocol):
    """A cell of `KLS`."""

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor, mask: OptionalTensor = None
    ) -> Tensor:
        """An estimate of KL(policy || reference) for each token; see the top of this file.

        Args:
            logprobs, ref_logprobs: [B, T] nats, with gradient where they carry one.
            mask: [B, T] bool, trained tokens; None: all are.

        Returns:
            [B, T] nats, 0 where masked.

        Raises:
            ValueError: shapes differ.
        """
        ...


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: OptionalTensor = None) -> Tensor:
    """The log-ratio itself: unbiased, any sign, high variance. For rewards.

    k1 = d, clamped to +-20 here and below, so that exp stays finite; a clamped token has no
    gradient. As a loss its expected gradient is 0.

    Args:
        logprobs, ref_logprobs, mask: [B, T], as in the module's docstring.

    Returns:
        [B, T] nats.
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
    if mask is None:
        mask = torch.ones_like(logprobs, dtype=torch.bool)
    difference = fill_masked(logprobs, mask) - fill_masked(ref_logprobs, mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor, mask: OptionalTensor = None) -> Tensor:
    """Half the squared log-ratio: biased to second order, with the gradient of the true KL.

    k2 = d**2 / 2; its expected gradient is that of KL(policy || reference).

    Args:
        logprobs, ref_logprobs, mask: [B, T], as in the module's docstring.

    Returns:
        [B, T] nats.
    """
    return kl_k1(logprobs, ref_logprobs, mask).square() / 2


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: OptionalTensor = None) -> Tensor:
    """Unbiased and of low variance, with the gradient of the other direction.

    k3 = exp(-d) - 1 + d, at most 10; its expected gradient is that of KL(reference || policy).

    Args:
        logprobs, ref_logprobs, mask: [B, T], as in the module's docstring.

    Returns:
        [B, T] nats.

    Source: J. Schulman, "Approximating KL divergence"; GRPO, arXiv:2402.03300, Eq. 4. Clamp as in
    verl and NeMo-RL.
    """
    difference = kl_k1(logprobs, ref_logprobs, mask)
    return (torch.expm1(-difference) + difference).clamp(max=MAX_K3)


def kl_k3_plus(logprobs: Tensor, ref_logprobs: Tensor, mask: OptionalTensor = None) -> Tensor:
    """The value of k3 with the gradient of k2: what a loss term should use.

    k3+ = sg(k3 - k2) + k2

    Args:
        logprobs, ref_logprobs, mask: [B, T], as in the module's docstring.

    Returns:
        [B, T] nats.
    """
    k2 = kl_k2(logprobs, ref_logprobs, mask)
    return (kl_k3(logprobs, ref_logprobs, mask) - k2).detach() + k2


def kl_k3_ratio(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: OptionalTensor = None,
    rollout_logprobs: OptionalTensor = None,
) -> Tensor:
    """k3 weighted by the ratio to the sampler: unbiased in value and in gradient.

    r * k3,  r = exp(logprobs - rollout_logprobs), not detached;  its derivative is r * d

    The ratio adds the score term that k3 alone lacks, and takes tokens of an older policy for what
    they are. k3 is not bounded at 10 here: a bounded k3 under an attached ratio would push a token
    that is already far below the reference further down. The derivative is written out, because
    its two terms, r * k3 and r * (1 - exp(-d)), cancel all digits of float32 where d is very
    negative. d and log r are kept within +-20; a token whose log r is outside has no gradient.

    Args:
        logprobs, ref_logprobs, mask: [B, T], as in the module's docstring.
        rollout_logprobs: [B, T] nats of the sampler; without them it is the current policy: r is 1,
            with its gradient.

    Returns:
        [B, T] nats.

    Source: DeepSeek-V3.2, arXiv:2512.02556.
    """
    if mask is None:
        mask = torch.ones_like(logprobs, dtype=torch.bool)
    difference = kl_k1(logprobs, ref_logprobs, mask).detach()
    current = fill_masked(logprobs, mask)
    now = current.detach()
    sampler = now
    if rollout_logprobs is not None:
        sampler = fill_masked(rollout_logprobs.detach(), mask)
    log_ratio = now - sampler
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    k3 = torch.expm1(-difference) + difference
    slope = torch.where(log_ratio.abs() > MAX_LOG_RATIO, 0.0, ratio * difference)
    return ratio * k3 + slope * (current - now)


def add_kl_to_rewards(
    rewards: Tensor,
    token_rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kl_coeff: float,
) -> tuple[Tensor, Tensor]:
    """Subtract kl_coeff * k1 from the rewards.

    With undiscounted returns this is the true sequence-level KL gradient.

    Args:
        rewards: [B], lose the row's summed penalty.
        token_rewards: [B, T], lose the token's.
        logprobs: [B, T] nats of the policy that sampled, or of its trainer-side copy; detached.
        ref_logprobs: [B, T] nats.
        mask: [B, T] bool, trained tokens.
        kl_coeff: weight of the KL.

    Returns:
        rewards, token_rewards.

    Source: InstructGPT, arXiv:2203.02155, Eq. 2; arXiv:2510.01555 on why only k1 is right here.
    """
    penalty = kl_coeff * kl_k1(logprobs.detach(), ref_logprobs, mask).to(token_rewards.dtype)
    penalized = torch.where(mask, token_rewards - penalty, token_rewards)
    return rewards - penalty.sum(1).to(rewards.dtype), penalized


# Row.kl -> its estimator; `loss_k3_ratio` is given rollout_logprobs as well. `loss_*` are added as
# kl_coeff * weighted_sum(kl, mask, loss_weights); `reward_*` go through add_kl_to_rewards.
KLS: dict[str, Estimator] = {
    "loss_k2": kl_k2,
    "loss_k3": kl_k3,
    "loss_k3_plus": kl_k3_plus,
    "loss_k3_ratio": kl_k3_ratio,
    "reward_k1": kl_k1,
}
