"""Advantages that compare the responses to one prompt: one reward in, one advantage out per row.

Args of every estimator: rewards [B] finite (else ValueError), one per response; group_ids [B]
int64, shared by the rows of one prompt. Returns [B]. Statistics are float64. A group of one, and a
group whose rewards are equal, teach nothing and get exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from oxrl.functional.masks import OptionalTensor, require_same_shape


@dataclass(frozen=True)
class Groups:
    """Rows of equal `group_ids`, and statistics of them, given back to every row. All float64."""

    index: Tensor  # [B], numbers the groups 0..P-1
    count: Tensor  # [P] float64, rows of each group

    @classmethod
    def of(cls, group_ids: Tensor) -> Groups:
        """Number the groups.

        Args:
            group_ids: [B], any integers.

        Returns:
            P groups, numbered in the order of their ids.
        """
        _, index, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(index=index, count=count.double())

    def sum(self, x: Tensor) -> Tensor:
        """The sum of each group, given to every row of it.

        Args:
            x: [B], any dtype; not changed.

        Returns:
            [B] float64.
        """
        return torch.zeros_like(self.count).index_add_(0, self.index, x.double())[self.index]

    def mean(self, x: Tensor) -> Tensor:
        """The mean of each group, given to every row of it.

        Args:
            x: [B], any dtype.

        Returns:
            [B] float64.
        """
        return self.sum(x) / self.size

    def extreme(self, x: Tensor, kind: Literal["amax", "amin"]) -> Tensor:
        """The largest or smallest value of each group, given to every row of it.

        Args:
            x: [B], any dtype.
            kind: "amax" or "amin".

        Returns:
            [B] float64.
        """
        start = torch.zeros_like(self.count)
        found = start.scatter_reduce_(0, self.index, x.double(), kind, include_self=False)
        return found[self.index]

    @property
    def size(self) -> Tensor:
        """Rows in the group, per row. [B]."""
        return self.count[self.index]

    def std(self, x: Tensor) -> Tensor:
        """The unbiased standard deviation of each group, given to every row of it.

        Args:
            x: [B], any dtype.

        Returns:
            [B] float64; 0 for a group of one.
        """
        squares = self.sum((x.double() - self.mean(x)).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()

    def flat(self, x: Tensor) -> Tensor:
        """Mark rows whose group has values that are equal up to rounding, or only one.

        Up to 1e-6 of the mean: equal rewards such as 0.1 have a float mean that differs in the last
        bit, which a division by a standard deviation of 1e-9 turns into advantages of 0.4; such a
        group must teach nothing.

        Args:
            x: [B], any dtype.

        Returns:
            [B] bool, the same for all rows of a group.
        """
        spread = self.extreme(x, "amax") - self.extreme(x, "amin")
        return (self.size < 2) | (spread <= 1e-6 * self.mean(x).abs().clamp(min=1.0))


def check_rewards(rewards: Tensor, group_ids: Tensor) -> None:
    """Refuse rewards that are not finite, or not one per row.

    Args:
        rewards, group_ids: [B], as in the module's docstring.

    Raises:
        ValueError: they are not.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids)
    if rewards.ndim != 1:
        raise ValueError(f"rewards must be [B], one per response, got shape {tuple(rewards.shape)}")
    bad = (~rewards.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"rewards of rows {bad[:8]} are not finite; "
            "drop unscored rows before computing advantages"
        )


def in_dtype_of(like: Tensor, x: Tensor) -> Tensor:
    """Bring a float64 statistic back to the dtype of its input, but at least float32.

    Args:
        like: the input.
        x: the statistic.

    Returns:
        `x`, in float64 only where `like` is.
    """
    return x.to(torch.promote_types(like.dtype, torch.float32))


def group_center(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward minus the group's mean: no standard deviation, so no bias towards some difficulty.

    A_i = R_i - mean of the group

    Args:
        rewards, group_ids: [B], as in the module's docstring.

    Returns:
        [B].

    Source: Dr.GRPO, arXiv:2503.20783.
    """
    check_rewards(rewards, group_ids)
    groups = Groups.of(group_ids)
    centered = torch.where(groups.flat(rewards), 0.0, rewards.double() - groups.mean(rewards))
    return in_dtype_of(rewards, centered)


def group_normalize(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-8) -> Tensor:
    """The reward in standard deviations from the group's mean.

    A_i = (R_i - mean) / (std + eps), unbiased standard deviation

    Args:
        rewards, group_ids: [B], as in the module's docstring.
        eps: added to the standard deviation.

    Returns:
        [B].

    Source: GRPO, arXiv:2402.03300, section 4.1.2. Deviations: groups of equal rewards give exactly
    0 (see `Groups.flat`); a group of one gives 0, because it has nothing to be compared with.
    """
    centered = group_center(rewards.double(), group_ids)
    std = Groups.of(group_ids).std(rewards)
    return in_dtype_of(rewards, centered / (std + eps))


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward minus the mean of the group's other rows: exactly unbiased.

    A_i = R_i - mean of the others = G / (G - 1) * (R_i - mean)

    Args:
        rewards, group_ids: [B], as in the module's docstring.

    Returns:
        [B].

    Source: RLOO, arXiv:2402.14740; Kool et al. 2019.
    """
    size = Groups.of(group_ids).size
    centered = group_center(rewards.double(), group_ids)
    return in_dtype_of(rewards, centered * size / (size - 1).clamp(min=1))


def group_center_batch_std(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-8) -> Tensor:
    """The reward minus the group's mean, in standard deviations of the batch: one scale for all.

    A_i = (R_i - mean of the group) / (std of the batch's rewards + eps)

    Args:
        rewards, group_ids: [B], as in the module's docstring.
        eps: added to the standard deviation.

    Returns:
        [B].

    Source: LitePPO, arXiv:2508.08221.
    """
    centered = group_center(rewards.double(), group_ids)
    scale = eps
    if len(rewards) > 1:
        scale = rewards.double().std() + eps
    return in_dtype_of(rewards, centered / scale)


def group_center_centered_std(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-8) -> Tensor:
    """The reward minus the group's mean, in standard deviations of these differences in the batch.

    A_i = C_i / (std of the batch's C + eps),  C_i = R_i - mean of the group

    Unlike `group_center_batch_std`, how much the groups' means differ does not enter the scale.

    Args:
        rewards, group_ids: [B], as in the module's docstring.
        eps: added to the standard deviation.

    Returns:
        [B].

    Source: ScaleRL, arXiv:2510.13786.
    """
    centered = group_center(rewards.double(), group_ids)
    scale = eps
    if len(rewards) > 1:
        scale = centered.std() + eps
    return in_dtype_of(rewards, centered / scale)


def group_center_rescaled(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward minus the group's mean, scaled up for the rows that teach nothing.

    A_i = (R_i - mean of the group) * B / (rows in groups whose rewards differ)

    So the gradient's scale does not shrink as groups are solved.

    Args:
        rewards, group_ids: [B], as in the module's docstring.

    Returns:
        [B].

    Source: GPG, arXiv:2504.02546.
    """
    centered = group_center(rewards.double(), group_ids)
    live = (~Groups.of(group_ids).flat(rewards)).sum().clamp(min=1)
    return in_dtype_of(rewards, centered * len(rewards) / live)


def length_weighted_center(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """The reward minus the group's length-weighted mean: nearly the baseline of least variance.

    A_i = R_i - sum_j n_j R_j / sum_j n_j over the group; for on-policy data only

    Args:
        rewards, group_ids: [B], as in the module's docstring.
        lengths: [B], n: trained tokens of the response.

    Returns:
        [B].

    Source: OPO, arXiv:2505.23585, with the response length for the squared norm of its gradient.
    """
    check_rewards(rewards, group_ids)
    groups = Groups.of(group_ids)
    baseline = groups.sum(rewards.double() * lengths) / groups.sum(lengths).clamp(min=1)
    centered = torch.where(groups.flat(rewards), 0.0, rewards.double() - baseline)
    return in_dtype_of(rewards, centered)


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Everything an advantage may be computed from: the whole rollout batch, valid rows only."""

    rewards: Tensor  # [B]
    token_rewards: Tensor  # [B, T], the same rewards placed on tokens
    response_mask: Tensor  # [B, T] bool, trained tokens
    group_ids: Tensor  # [B], shared by the responses to one prompt
    values: OptionalTensor = None  # [B, T], the critic's
    bootstrap: OptionalTensor = None  # [B], the critic's value after the last token
    truncated: OptionalTensor = None  # [B] bool, cut by the token limit
    greedy_rewards: OptionalTensor = None  # [B], of the prompt's greedy response
    part_rewards: OptionalTensor = None  # [B, K], of the parts of the reward, NaN for none
    part_weights: OptionalTensor = None  # [K], theirs
    old_logprobs: OptionalTensor = None  # [B, T] nats of the sampled tokens
    policy_logprobs: OptionalTensor = None  # [B, T] nats, of the policy before the update
    sum_p_squared: OptionalTensor = None  # [B, T], of the same policy, over the vocabulary
    teacher_logprobs: OptionalTensor = None  # [B, T] nats of the sampled tokens
    turns: OptionalTensor = None  # [B, T] int64, turn of an episode in which a token was sampled
    next_turn: OptionalTensor = None  # [B] bool, the episode was cut where a turn would begin
    done: float = 0.0  # share of the run's optimizer steps that were taken before

    def need(self, name: str) -> Tensor:
        """The field `name`, which the chosen advantage cannot do without.

        Args:
            name: of a field that may be None.

        Returns:
            The field, as it is described above.

        Raises:
            ValueError: it is None.
        """
        tensor = getattr(self, name)
        if tensor is None:
            raise ValueError(f"this advantage needs {name}, which nothing in this run computes")
        return tensor


# Advantages [B, T], and what the critic learns to predict, [B, T], or None.
AdvantagesAndReturns = tuple[Tensor, OptionalTensor]


class Estimator(Protocol):
    """A cell of `ADVANTAGES`; its numbers come by keyword."""

    def __call__(self, x: AdvantageInputs, *args: Any, **numbers: Any) -> AdvantagesAndReturns:
        """Advantages of the whole batch of a step.

        Args:
            x: what there is to estimate them from.
            args: none; they let type checkers accept what a cell takes besides.
            numbers: of the cell.

        Returns:
            Advantages [B, T], and what a critic learns to predict [B, T], None where there is no
            critic.

        Raises:
            ValueError: `x` lacks what the cell reads.
        """
        ...


def of_rows(x: AdvantageInputs, row_advantages: Tensor) -> AdvantagesAndReturns:
    """An outcome advantage on every trained token of its row, as a cell gives it.

    Args:
        x: what the cell was given.
        row_advantages: [B].

    Returns:
        Advantages [B, T], and nothing for a critic.
    """
    return torch.where(x.response_mask, row_advantages[:, None], 0.0), None


def of_rewards(estimate: Callable[..., Tensor]) -> Estimator:
    """The cell of an estimator of this file that reads rewards and groups only.

    Args:
        estimate: of rewards [B] and group ids [B], and its numbers by keyword, advantages [B].

    Returns:
        The estimator on the whole batch of a step, for `ADVANTAGES`.
    """

    @wraps(estimate)
    def cell(x: AdvantageInputs, **numbers: Any) -> AdvantagesAndReturns:
        return of_rows(x, estimate(x.rewards, x.group_ids, **numbers))

    return cell


# The cells of `ADVANTAGES` that most runs use.
GROUP_ADVANTAGES: dict[str, Estimator] = {
    "group_normalize": of_rewards(group_normalize),
    "group_center": of_rewards(group_center),
    "group_center_batch_std": of_rewards(group_center_batch_std),
    "group_center_centered_std": of_rewards(group_center_centered_std),
    "group_center_rescaled": of_rewards(group_center_rescaled),
    "leave_one_out": of_rewards(leave_one_out),
}
