"""Rewards on one scale: less their mean, divided by how far they spread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oxrl.functional.masks import require_same_shape

# Added to the standard deviation: rewards that are equal up to rounding become about 0.
STD_EPS = 1e-6


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
    return divided + torch.where(last, rest[:, None], 0.0)
