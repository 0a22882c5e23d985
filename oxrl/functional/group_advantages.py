"""Advantages that compare the responses to one prompt: one reward per row in, one advantage per row
out.

Args of every estimator: rewards [B] finite (else ValueError), one per response; group_ids [B]
int64, shared by the rows of one prompt. Returns [B]. Statistics are float64. A group of one, and a
group whose rewards are equal, teach nothing and get exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oxrl.functional.masks import at_least_float32, require_same_shape


@dataclass(frozen=True)
class Groups:
    """Rows of equal `group_ids`: `index` [B] numbers the groups 0..P-1, `count` [P] float64 counts
    their rows.
    """

    index: Tensor
    count: Tensor

    @classmethod
    def of(cls, group_ids: Tensor) -> Groups:
        _, index, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(index=index, count=count.double())

    def sum(self, x: Tensor) -> Tensor:
        """Group sum of `x` [B], given back to every row of the group. [B] float64."""
        return torch.zeros_like(self.count).index_add_(0, self.index, x.double())[self.index]

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.size

    def extreme(self, x: Tensor, kind: str) -> Tensor:
        """Group `amax` or `amin` of `x`, per row."""
        start = torch.zeros_like(self.count)
        return start.scatter_reduce_(0, self.index, x.double(), kind, include_self=False)[
            self.index
        ]

    @property
    def size(self) -> Tensor:
        """Rows in the group, per row. [B] float64."""
        return self.count[self.index]

    def std(self, x: Tensor) -> Tensor:
        """Unbiased, 0 for a group of one. [B] float64."""
        squares = self.sum((x.double() - self.mean(x)).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()

    def flat(self, x: Tensor) -> Tensor:
        """[B] bool: the group's values are equal up to rounding (1e-6 of the mean), or there is
        only one.

        Equal rewards such as 0.1 have a float mean that differs in the last bit, which a division
        by a standard deviation of 1e-9 turns into advantages of 0.4; such a group must teach
        nothing.
        """
        spread = self.extreme(x, "amax") - self.extreme(x, "amin")
        return (self.size < 2) | (spread <= 1e-6 * self.mean(x).abs().clamp(min=1.0))


def _check_rewards(rewards: Tensor, group_ids: Tensor) -> None:
    require_same_shape(rewards=rewards, group_ids=group_ids)
    if rewards.ndim != 1:
        raise ValueError(f"rewards must be [B], one per response, got shape {tuple(rewards.shape)}")
    bad = (~rewards.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"rewards of rows {bad[:8]} are not finite; drop unscored rows before computing advantages"
        )


def group_center(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = R_i - mean of the group: no division by the standard deviation, so no difficulty bias.

    Source: Dr.GRPO, arXiv:2503.20783.
    """
    _check_rewards(rewards, group_ids)
    groups = Groups.of(group_ids)
    centered = torch.where(groups.flat(rewards), 0.0, rewards.double() - groups.mean(rewards))
    return centered.to(at_least_float32(rewards).dtype)


def group_normalize(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-8) -> Tensor:
    """A_i = (R_i - mean) / (std + eps) with the group's mean and unbiased standard deviation.

    Source: GRPO, arXiv:2402.03300, section 4.1.2. Deviations: groups of equal rewards give exactly
    0 (see `Groups.flat`); a group of one gives 0, because it has nothing to be compared with.
    """
    centered, std = group_center(rewards.double(), group_ids), Groups.of(group_ids).std(rewards)
    return (centered / (std + eps)).to(at_least_float32(rewards).dtype)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = R_i - mean of the other rows of the group = G / (G - 1) * (R_i - mean): exactly
    unbiased.

    Source: RLOO, arXiv:2402.14740; Kool et al. 2019.
    """
    groups = Groups.of(group_ids)
    centered = group_center(rewards.double(), group_ids)
    return (centered * groups.size / (groups.size - 1).clamp(min=1)).to(
        at_least_float32(rewards).dtype
    )


def group_center_batch_std(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-8) -> Tensor:
    """A_i = (R_i - mean of the group) / (std of the batch's rewards + eps): one scale for all
    groups.

    Source: LitePPO, arXiv:2508.08221; ScaleRL, arXiv:2510.13786.
    """
    centered = group_center(rewards.double(), group_ids)
    std = (
        rewards.double().std()
        if len(rewards) > 1
        else torch.zeros((), dtype=torch.float64, device=rewards.device)
    )
    return (centered / (std + eps)).to(at_least_float32(rewards).dtype)


def group_center_rescaled(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = (R_i - mean of the group) * B / (rows in groups whose rewards differ).

    Makes up for the rows that teach nothing, so the gradient's scale does not shrink as groups are
    solved.
    Source: GPG, arXiv:2504.02546.
    """
    centered = group_center(rewards.double(), group_ids)
    live = (~Groups.of(group_ids).flat(rewards)).sum().clamp(min=1)
    return (centered * len(rewards) / live).to(at_least_float32(rewards).dtype)


def length_weighted_center(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """A_i = R_i - sum_j n_j R_j / sum_j n_j over the group: nearly the variance-optimal baseline.
    On-policy only.

    Source: OPO, arXiv:2505.23585, with the response length n [B] for the squared norm of its
    gradient.
    """
    _check_rewards(rewards, group_ids)
    groups = Groups.of(group_ids)
    baseline = groups.sum(rewards.double() * lengths) / groups.sum(lengths).clamp(min=1)
    return torch.where(groups.flat(rewards), 0.0, rewards.double() - baseline).to(
        at_least_float32(rewards).dtype
    )


# Advantages for more than one try: rewards are 0 or 1, else ValueError, but for `top_gap`.


def _successes(rewards: Tensor, group_ids: Tensor) -> tuple[Groups, Tensor]:
    """Groups and, per row, its group's count of successes."""
    if not bool(((rewards == 0) | (rewards == 1)).all()):
        found = sorted(set(rewards.tolist()))[:5]
        raise ValueError(f"this advantage counts successes: rewards must be 0 or 1, got {found}")
    groups = Groups.of(group_ids)
    return groups, groups.sum(rewards)


def mean_normalize(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = (R_i - mean) / (mean + eps), 0 in groups without a success: with c of G right, G / c -
    1 or -1.

    Its expectation is sum_{k < G} 1/k * gradient of pass@k, which for G to infinity is the gradient
    of log p: maximum likelihood of right answers.
    Source: MaxRL, arXiv:2602.02710.
    """
    groups, _ = _successes(rewards, group_ids)
    advantages = group_center(rewards.double(), group_ids) / (groups.mean(rewards) + eps)
    return advantages.to(at_least_float32(rewards).dtype)


def failure_chance(others: Tensor, successes: Tensor, *, k: int) -> Tensor:
    """Probability that k draws without replacement among `others` rows, `successes` of them right,
    are all wrong.
    """
    chance = torch.ones_like(others, dtype=torch.float64)
    for drawn in range(k):
        wrong = (others - successes - drawn).clamp(min=0) / (others - drawn).clamp(min=1)
        chance = chance * torch.where(others > drawn, wrong, (successes == 0).double())
    return chance


def pass_at_k_rewards(rewards: Tensor, group_ids: Tensor, *, pass_k: int) -> Tensor:
    """s_i = k/n for a right row, k/n * pass@(k-1) of the other rows for a wrong one, 1 <= k <=
    group size; float64.

    sum_i s_i * grad logprobs_i is an unbiased estimate of the gradient of pass@k; for k = 1, s_i =
    R_i / n.
    Source: PKPO, arXiv:2505.15201.
    """
    groups, successes = _successes(rewards, group_ids)
    reached = 1 - failure_chance(groups.size - 1, successes, k=pass_k - 1)
    return pass_k / groups.size * torch.where(rewards == 1, 1.0, reached)


def pass_at_k_advantage(rewards: Tensor, group_ids: Tensor, *, pass_k: int) -> Tensor:
    """A_i = n * s_i - mean over the other rows j of n_-i * s_j, computed without row i: PKPO with
    its baseline.

    The baseline knows nothing of row i, so the estimate stays unbiased; for k = 1 this is
    `leave_one_out`.
    Source: PKPO, arXiv:2505.15201, with its leave-one-out baseline.
    """
    groups, successes = _successes(rewards, group_ids)
    scores = groups.size * pass_at_k_rewards(rewards, group_ids, pass_k=pass_k)
    others, right = groups.size - 1, successes - rewards
    reached = 1 - failure_chance((others - 1).clamp(min=0), right, k=pass_k - 1)
    baseline = pass_k * (right + (others - right) * reached) / others.clamp(min=1)
    return torch.where(groups.flat(rewards), 0.0, scores - baseline).to(
        at_least_float32(rewards).dtype
    )


def top_gap(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(best - second best) / (std + eps) for the group's best row, 0 for all others; any rewards.

    Source: pass@k training, arXiv:2503.19595; verl `grpo_passk`.
    """
    _check_rewards(rewards, group_ids)
    groups = Groups.of(group_ids)
    is_best = rewards.double() == groups.extreme(rewards, "amax")
    second = groups.extreme(torch.where(is_best, -torch.inf, rewards.double()), "amax")
    alone = is_best & (groups.sum(is_best) == 1) & ~groups.flat(rewards)
    gap = (rewards.double() - second) / (groups.std(rewards) + eps)
    return torch.where(alone, gap, 0.0).to(at_least_float32(rewards).dtype)
