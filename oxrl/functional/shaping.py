"""Rewards before they become advantages, and the numbers that steer a run between steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oxrl.functional.group_advantages import Groups
from oxrl.functional.masks import broadcast, require_same_shape

# Added to the standard deviation: rewards that are equal up to rounding become about 0.
STD_EPS = 1e-6


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """A penalty that grows with length over the last tokens before the limit.

    0 up to max_tokens - buffer_tokens, then linearly down to -1 at max_tokens, -1 beyond

    Group filters read the reward without it.

    Args:
        lengths: [B], tokens of each response.
        max_tokens: the limit.
        buffer_tokens: tokens over which the penalty grows.

    Returns:
        [B] float64.

    Source: soft overlong punishment, DAPO, arXiv:2503.14476, Eq. 13.
    """
    return ((max_tokens - buffer_tokens - lengths.double()) / buffer_tokens).clamp(-1.0, 0.0)


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Mark rows whose group has rewards that differ, so that it can teach something.

    For rewards 0 and 1 it is 0 < correct < G.

    Args:
        rewards: [B], raw, before shaping.
        group_ids: [B].

    Returns:
        [B] bool.

    Source: dynamic sampling, DAPO, arXiv:2503.14476, Eq. 11.
    """
    return ~Groups.of(group_ids).flat(rewards)


def adapt_kl_coeff(
    kl_coeff: float, kl: float, *, kl_target: float, kl_horizon: float, rows: int
) -> float:
    """Steer the KL to its target by its coefficient.

    kl_coeff * (1 + clip(kl / kl_target - 1, -0.2, 0.2) * rows / kl_horizon): an error of 20 %
    changes the coefficient by 20 % over kl_horizon rows.

    Args:
        kl_coeff: the present coefficient.
        kl: found, nats per response.
        kl_target: wanted, nats per response.
        kl_horizon: rows.
        rows: responses that came in since the last call.

    Returns:
        The next coefficient.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2.
    """
    error = min(max(kl / kl_target - 1, -0.2), 0.2)
    return kl_coeff * (1 + error * rows / kl_horizon)


def pass_at_k(total: Tensor, correct: Tensor, *, k: int) -> Tensor:
    """Probability that k draws without replacement contain a correct sample.

    1 - C(total - correct, k) / C(total, k), as the product over j = total - correct + 1 .. total of
    (1 - k / j)

    Averaged over prompts, the unbiased estimate of pass@k. Where total < k, any correct sample
    gives 1.

    Args:
        total, correct: any shapes that broadcast, counts of samples.
        k: draws.

    Returns:
        float64.

    Source: Chen et al., arXiv:2107.03374, Eq. 1.
    """
    total, correct = torch.broadcast_tensors(total.double(), correct.double())
    j = torch.arange(1, int(total.max()) + 1, dtype=torch.float64, device=total.device)
    wrong = total - correct
    within = (j > wrong[..., None]) & (j <= total[..., None])
    factors = (1 - k / j).clamp(min=0.0)
    return 1 - torch.where(within, factors, 1.0).prod(-1)


def best_at_k(rewards: Tensor, *, k: int) -> Tensor:
    """Expected largest of k draws without replacement from each row of rewards.

    The i-th smallest reward is the largest of the draw in C(i - 1, k - 1) of C(n, k) cases. For
    rewards 0 and 1 it is pass@k: 1 - C(wrong, k) / C(n, k).

    Args:
        rewards: [P, n].
        k: draws, at most n.

    Returns:
        [P] float64.
    """
    n = rewards.shape[1]
    draws = math.comb(n, k)
    chances = [math.comb(smaller, k - 1) / draws for smaller in range(n)]
    weights = torch.tensor(chances, dtype=torch.float64, device=rewards.device)
    return rewards.double().sort(1).values @ weights


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Running count, mean and squared deviations of the rewards seen so far.

    count: how many. mean: of them. squares: the sum of their squared distances from it.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Their unbiased standard deviation; 0 of fewer than two."""
        if self.count < 2:
            return 0.0
        variance = self.squares / (self.count - 1)
        return variance**0.5

    def with_values(self, values: Tensor) -> Moments:
        """The moments of what was seen and of `values` together.

        Args:
            values: [B].

        Returns:
            Other moments; these, where there are no values.

        Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for
        computing sample variances", Eq. 2.1.
        """
        added = len(values)
        if not added:
            return self
        new = values.double()
        mean = float(new.mean())
        squares = float((new - mean).square().sum())
        count = self.count + added
        apart = mean - self.mean
        between = apart**2 * self.count * added / count
        return Moments(
            count=count,
            mean=self.mean + apart * added / count,
            squares=self.squares + squares + between,
        )


def scale_rewards(rewards: Tensor, moments: Moments | None, *, clip: float | None) -> Tensor:
    """Normalise rewards, and bound them.

    clip((r - mean) / (std + 1e-6), -clip, clip)

    Args:
        rewards: [B].
        moments: mean and spread to normalise by; None: rewards stay as they are but for the bound.
        clip: largest absolute value; None: any.

    Returns:
        [B] float64.

    Source: whitening by running moments that have seen the batch first, and the bound after it: TRL
    0.11, PPOTrainer.step with use_score_scaling, use_score_norm and score_clip.
    """
    scaled = rewards.double()
    if moments is not None:
        scaled = (scaled - moments.mean) / (moments.std + STD_EPS)
    if clip is not None:
        scaled = scaled.clamp(-clip, clip)
    return scaled


def move_to_scale(
    token_rewards: Tensor,
    mask: Tensor,
    rewards: Tensor,
    scaled: Tensor,
    *,
    moments: Moments | None,
) -> Tensor:
    """Rewards of tokens on the scale of the rewards of their rows.

    Each is divided as the rows' rewards were; what else became of a row's reward, the mean that was
    taken off and the bound, is on its last token. A row's tokens add up to its reward as before.

    Args:
        token_rewards: [B, T], before.
        mask: [B, T] bool, sampled tokens.
        rewards: [B], before.
        scaled: [B], of `scale_rewards`.
        moments: as there.

    Returns:
        [B, T] float64.
    """
    require_same_shape(token_rewards=token_rewards, mask=mask)
    spread = 1.0 if moments is None else moments.std + STD_EPS
    divided = token_rewards.double() / spread
    rest = scaled - rewards.double() / spread
    tokens_from_here = mask.flip(1).cumsum(1).flip(1)
    last = mask & (tokens_from_here == 1)
    return divided + broadcast(rest, last)
