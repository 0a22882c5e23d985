"""Importance-ratio levels: one ratio per token, or one shared by a row.

A gate computes `ratio = exp(logprobs - anchor)`. An anchor function returns the (detached) anchor
for which that ratio has the wanted value while its gradient still reaches each token by `d ratio /
d logprobs = ratio`. A row-level ratio in this form is GSPO-token of arXiv:2507.18071, Eq. 14; with
one advantage per row and `sequence_mean` weights it has the gradient of GSPO.

A row-level anchor is float64, whatever the logprobs are: subtracted from float32 logprobs of any
size, it gives every token of a row the same float32 log-ratio, to the last bit. In float32 the
tokens' own rounding, 1e-6 at a logprob of -10, would decide which of them a clip bound of 3e-4
leaves.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from oxrl.functional.masks import (
    broadcast,
    fill_masked,
    masked_mean,
    masked_sum,
    require_same_shape,
)
from oxrl.tables.numbers import CORRECTION_LEVEL, Level

MAX_LOG_RATIO = 20.0


class RatioLevel(Protocol):
    """A log-ratio [B, T] per token, brought to a level: [B, T], zero where masked."""

    def __call__(self, log_ratio: Tensor, mask: Tensor, /) -> Tensor:
        """Bring the log-ratios of tokens to a level, such as one for each row.

        Args:
            log_ratio: [B, T] nats.
            mask: [B, T] bool, trained tokens.

        Returns:
            [B, T] nats; 0 where masked.
        """
        ...


class Anchor(Protocol):
    """A cell of `RATIOS`."""

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Return the logprobs that replace `old_logprobs` in a gate, to give it this level's ratio.

        Args:
            logprobs, old_logprobs: [B, T] nats, now and of the policy to compare with.
            mask: [B, T] bool, trained tokens.

        Returns:
            [B, T] nats, detached.
        """
        ...


def sequence_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Log-ratio of the whole response: unbiased, and explodes with length.

    Args:
        log_ratio: [B, T] nats, of the tokens.
        mask: [B, T] bool, trained tokens.

    Returns:
        [B, T], on every token the sum over its row; 0 where masked.
    """
    return broadcast(masked_sum(log_ratio, mask, dim=1), mask)


def geometric_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Length-normalized log-ratio of the response, as in GSPO.

    Args:
        log_ratio: [B, T] nats, of the tokens.
        mask: [B, T] bool, trained tokens.

    Returns:
        [B, T], on every token the mean over its row; 0 where masked.
    """
    return broadcast(masked_mean(log_ratio, mask, dim=1), mask)


LEVELS: dict[str, RatioLevel] = {
    "token": fill_masked,
    "sequence": sequence_level,
    "geometric": geometric_level,
}


def token_anchor(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The old log-probabilities themselves: one ratio per token.

    Args:
        logprobs, old_logprobs, mask: [B, T]; old_logprobs are the sampler's where the row's
            denominator is "rollout".

    Returns:
        [B, T] nats, detached: the gate's second argument.
    """
    return old_logprobs.detach()


def no_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The current log-probabilities: the ratio is 1 everywhere.

    Args:
        logprobs, old_logprobs, mask: [B, T], as in `token_anchor`.

    Returns:
        [B, T] nats, detached.
    """
    return logprobs.detach()


def sequence_anchor(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Anchor under which every token of a row has the row's product ratio.

    Args:
        logprobs, old_logprobs, mask: [B, T], as in `token_anchor`.

    Returns:
        [B, T] nats, float64, detached.
    """
    return _row_anchor(logprobs, old_logprobs, mask, sequence_level)


def geometric_anchor(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Anchor under which every token of a row has the row's geometric-mean ratio.

    Args:
        logprobs, old_logprobs, mask: [B, T], as in `token_anchor`.

    Returns:
        [B, T] nats, float64, detached.
    """
    return _row_anchor(logprobs, old_logprobs, mask, geometric_level)


def _row_anchor(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """The logprobs minus their row's log-ratio, which is rounded as the gate will see it."""
    now = logprobs.detach().double()
    of_row = level(now - old_logprobs.detach().double(), mask)
    rounded = of_row.to(torch.promote_types(logprobs.dtype, torch.float32))
    return now - rounded.double()


RATIOS: dict[str, Anchor] = {
    "none": no_ratio,
    "token": token_anchor,
    "sequence": sequence_anchor,
    "geometric": geometric_anchor,
}


def interpolated_anchor(
    logprobs: Tensor, rollout_logprobs: Tensor, ages: Tensor, mask: Tensor
) -> Tensor:
    """Anchor between sampler and current policy: a proximal policy without a forward pass.

    log prox = rollout + alpha * (logprobs - rollout)
    alpha = (age - 1) / age, 0 for an age of at most one rollout batch

    Tokens of the current rollout batch have age 0, in its last minibatch as in its first: their
    ratio is PPO's own. With r against prox and the weight exp(prox - rollout), uncapped, the
    product is always the full ratio against the sampler.

    Args:
        logprobs, rollout_logprobs: [B, T] nats, of the current policy and of the sampler.
        ages: [B, T], versions of the sampler's weights, one per rollout batch, between those that
            sampled a token and those that the update starts from.
        mask: [B, T] bool, trained tokens.

    Returns:
        [B, T] nats, detached, 0 where masked.

    Source: A-3PO, arXiv:2512.06547; AReaL, `compute_prox_logp_approximations`.
    """
    age = ages.clamp(min=1).to(logprobs.dtype)
    rollout = fill_masked(rollout_logprobs, mask)
    return (rollout + (age - 1) / age * (fill_masked(logprobs, mask) - rollout)).detach()


def importance_ratio(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    correction_level: Level = CORRECTION_LEVEL.default,
) -> Tensor:
    """The ratio rho between trainer and sampler, its logarithm clamped to +-20.

    Args:
        old_logprobs, rollout_logprobs, mask: [B, T], of the trainer at the start of the step,
            of the sampler, and of trained tokens.
        correction_level: whose ratio is judged.

    Returns:
        rho [B, T], detached, 1 where masked.
    """
    require_same_shape(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    old = fill_masked(old_logprobs.detach(), mask)
    log_rho = old - fill_masked(rollout_logprobs.detach(), mask)
    return LEVELS[correction_level](log_rho, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
