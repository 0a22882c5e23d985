"""Importance-ratio levels: one ratio per token, or one shared by a row.

A gate computes `ratio = exp(logprobs - anchor)`. An anchor function returns the (detached) anchor
for which that ratio has the wanted value while its gradient still reaches each token by `d ratio /
d logprobs = ratio`. A row-level ratio in this form is GSPO-token of arXiv:2507.18071, Eq. 14; with
one advantage per row and `sequence_mean` weights it has the gradient of GSPO.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oxrl.functional.masks import fill_masked, masked_mean, masked_sum

MAX_LOG_RATIO = 20.0


def sequence_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Sum over the row: the log-ratio of the whole response; unbiased, and explodes with length.
    [B, T].
    """
    return torch.where(mask, masked_sum(log_ratio, mask, dim=1)[:, None], 0.0)


def geometric_level(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Mean over the row: the length-normalized log-ratio of GSPO; 0 for an empty row. [B, T]."""
    return torch.where(mask, masked_mean(log_ratio, mask, dim=1)[:, None], 0.0)


# level -> (log_ratio [B, T], mask [B, T]) -> log_ratio [B, T] at that level, zero where masked.
LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": fill_masked,
    "sequence": sequence_level,
    "geometric": geometric_level,
}


def token_anchor(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The old log-probabilities themselves: one ratio per token."""
    return old_logprobs.detach()


def no_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The current log-probabilities: the ratio is 1 everywhere."""
    return logprobs.detach()


def sequence_anchor(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Anchor under which every token of a row has the row's product ratio."""
    return (logprobs - sequence_level(logprobs - old_logprobs, mask)).detach()


def geometric_anchor(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Anchor under which every token of a row has the row's geometric-mean ratio."""
    return (logprobs - geometric_level(logprobs - old_logprobs, mask)).detach()


# Row.ratio -> (logprobs, old_logprobs or rollout_logprobs, mask) -> anchor [B, T], the gate's
# second argument.
RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": no_ratio,
    "token": token_anchor,
    "sequence": sequence_anchor,
    "geometric": geometric_anchor,
}


def interpolated_anchor(
    logprobs: Tensor, rollout_logprobs: Tensor, lags: Tensor, mask: Tensor
) -> Tensor:
    """log prox = rollout + alpha * (logprobs - rollout), alpha = (lag - 1) / lag, 0 for a lag of at
    most one version.

    A proximal policy without a forward pass of its own. With r against it and the weight exp(prox -
    rollout), the product is always the full ratio against the sampler. `lags` [B, T] count the
    optimizer steps between the weights that sampled a token and those being updated. [B, T],
    detached, 0 where masked.
    Source: A-3PO, arXiv:2512.06547.
    """
    lag = lags.clamp(min=1).to(logprobs.dtype)
    rollout = fill_masked(rollout_logprobs, mask)
    return (rollout + (lag - 1) / lag * (fill_masked(logprobs, mask) - rollout)).detach()
