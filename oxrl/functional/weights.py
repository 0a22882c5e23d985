"""Loss weights: how tokens are averaged, decided once per optimizer step over the global batch.

Every loss ends in `(token_loss * loss_weights).sum()`, so splitting rows into micro-batches or over
ranks cannot change a gradient. A rejected token keeps its share: denominators come from
`response_mask`, never from a correction. Rows with no trained token get weight 0 and are not
counted as rows, except by `fixed_length`, where they are real samples.

Args: response_mask [B, T] bool, the trained tokens of the whole optimizer step; group_ids [B]
int64, shared by the rows of one prompt. Returns [B, T] float32, zero outside the mask. ValueError
where shapes or types are others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from oxrl.functional.group_advantages import Groups
from oxrl.functional.masks import require_same_shape


class Weights(Protocol):
    """A cell of `WEIGHTS`; its numbers come by keyword."""

    def __call__(
        self, response_mask: Tensor, group_ids: Tensor, *args: Any, **numbers: Any
    ) -> Tensor:
        """Weigh each token of a step's batch; see the top of this file.

        Args:
            response_mask: [B, T] bool, trained tokens.
            group_ids: [B] int64, shared by the rows of one prompt.
            args: none; they let type checkers accept what a cell takes besides.
            numbers: of the cell.

        Returns:
            [B, T] float32; 0 outside of the mask.

        Raises:
            ValueError: shapes or types are others.
        """
        ...


def _counts(response_mask: Tensor) -> Tensor:
    """Trained tokens of every row. [B] float64."""
    if response_mask.ndim != 2 or response_mask.dtype != torch.bool:
        found = f"{response_mask.dtype} of shape {tuple(response_mask.shape)}"
        raise ValueError(f"response_mask must be bool [B, T], got {found}")
    return response_mask.sum(1).double()


def _spread(row_weights: Tensor, response_mask: Tensor) -> Tensor:
    """[B] float64 to [B, T] float32, zero outside the mask."""
    return torch.where(response_mask, row_weights[:, None], 0.0).float()


def token_mean(response_mask: Tensor) -> Tensor:
    """Every token counts the same.

    1 / N on every trained token, N = trained tokens of the global batch

    Args:
        response_mask: [B, T] bool.

    Returns:
        [B, T] float32.

    Source: DAPO, arXiv:2503.14476, Eq. 8. Also PPO, VAPO, CISPO, SFT.
    """
    counts = _counts(response_mask)
    return _spread(torch.ones_like(counts) / counts.sum().clamp(min=1), response_mask)


def sequence_mean(response_mask: Tensor) -> Tensor:
    """Every response counts the same, whatever its length.

    1 / (rows * tokens of the row)

    Args:
        response_mask: [B, T] bool.

    Returns:
        [B, T] float32.

    Source: GRPO, arXiv:2402.03300, Eq. 3.
    """
    counts = _counts(response_mask)
    rows = (counts > 0).sum().clamp(min=1)
    return _spread(1.0 / (rows * counts.clamp(min=1)), response_mask)


def sequence_sum(response_mask: Tensor) -> Tensor:
    """The unbiased objective of a whole sequence: its tokens are summed, responses averaged.

    1 / rows on every trained token

    Args:
        response_mask: [B, T] bool.

    Returns:
        [B, T] float32.

    Source: REINFORCE and RLOO, arXiv:2402.14740; LUSPO, arXiv:2602.05261.
    """
    counts = _counts(response_mask)
    rows = (counts > 0).sum().clamp(min=1)
    return _spread(torch.ones_like(counts) / rows, response_mask)


def fixed_length(response_mask: Tensor, *, weights_length: int) -> Tensor:
    """A constant on every trained token: neither its row's length nor the batch's matters.

    1 / (B * weights_length); empty rows count in B: they are real samples

    Args:
        response_mask: [B, T] bool.
        weights_length: tokens, a constant of the run, usually `rollout.max_tokens`; changing it
            rescales the learning rate.

    Returns:
        [B, T] float32.

    Raises:
        ValueError: weights_length is below 1.

    Source: Dr.GRPO, arXiv:2503.20783.
    """
    if weights_length < 1:
        raise ValueError(
            f"weights_length must be at least 1, got {weights_length}; rollout.max_tokens is usual"
        )
    counts = _counts(response_mask)
    weight = 1.0 / (max(len(counts), 1) * weights_length)
    return _spread(torch.full_like(counts, weight), response_mask)


def prompt_mean(response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """Every prompt counts the same, and within it every token.

    1 / (prompts * tokens of the prompt's rows); prompts without a trained token are not counted

    Args:
        response_mask: [B, T] bool.
        group_ids: [B].

    Returns:
        [B, T] float32.

    Source: ScaleRL, arXiv:2510.13786.
    """
    counts = _counts(response_mask)
    require_same_shape(group_ids=group_ids, row_counts=counts)
    tokens = Groups.of(group_ids).sum(counts)  # [B], of the row's prompt
    prompts = len(group_ids[tokens > 0].unique())
    return _spread(1.0 / (max(prompts, 1) * tokens.clamp(min=1)), response_mask)


def length_preference(lengths: Tensor, group_ids: Tensor, length_power: Tensor | float) -> Tensor:
    """Compute each row's weight by its length, relative to the average of its group.

    f_i = G * softmax over the group of h_i ** length_power,  h_i = 1 + z_i / 9

    z is the z-score of the length, f sums to G. Rows without a trained token are left out.

    Args:
        lengths: [B], trained tokens of each row.
        group_ids: [B].
        length_power: 0 treats all lengths alike, a positive power favours long rows, a negative one
            short rows. Differentiable, should it be learned.

    Returns:
        f [B] float64.

    Source: lambda-GRPO, arXiv:2510.06870; the factor 1/9 was not verified.
    """
    groups = Groups.of(group_ids)
    real = (lengths > 0).double()
    rows = groups.sum(real).clamp(min=1)
    centered = (lengths.double() - groups.sum(lengths) / rows) * real
    std = (groups.sum(centered.square()) / rows).sqrt()
    score = (1 + (centered / std.clamp(min=1e-8) / 9).clamp(-0.9, 0.9)) ** length_power
    # A softmax that large powers do not overflow.
    share = (score - groups.extreme(score.detach(), "amax")).exp() * real
    return rows * share / groups.sum(share).clamp(min=1e-300)


def lambda_group(response_mask: Tensor, group_ids: Tensor, *, length_power: float) -> Tensor:
    """`prompt_mean` with a preference for long or short rows within a prompt.

    f_i / (prompts * tokens of the prompt's rows), f = `length_preference`

    Args:
        response_mask: [B, T] bool.
        group_ids: [B].
        length_power: 0 is `prompt_mean`, a positive power favours long rows.

    Returns:
        [B, T] float32.

    Source: lambda-GRPO, arXiv:2510.06870. Deviation: the power is a number of the run, not a
    learned parameter.
    """
    by_prompt = prompt_mean(response_mask, group_ids).double()
    preference = length_preference(_counts(response_mask), group_ids, length_power)
    return (by_prompt * preference[:, None]).float()


def of_responses(weigh: Callable[..., Tensor]) -> Weights:
    """The cell of weights that do not look at the prompts.

    Args:
        weigh: of the mask [B, T] and the numbers of the cell, weights [B, T].

    Returns:
        The same, for `WEIGHTS`.
    """

    @wraps(weigh)
    def cell(response_mask: Tensor, group_ids: Tensor, **numbers: Any) -> Tensor:
        return weigh(response_mask, **numbers)

    return cell


WEIGHTS: dict[str, Weights] = {
    "token_mean": of_responses(token_mean),
    "sequence_mean": of_responses(sequence_mean),
    "sequence_sum": of_responses(sequence_sum),
    "fixed_length": of_responses(fixed_length),
    "prompt_mean": prompt_mean,
    "lambda_group": lambda_group,
}
