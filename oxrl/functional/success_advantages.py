"""Advantages of groups whose rewards are successes, 0 or 1, or of which one row is the best.

Args of every estimator are those of group_advantages.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.group_advantages import Groups, check_rewards, group_center, in_dtype_of
from oxrl.tables.numbers import MAXRL_ORDER, PASS_K


def _successes(rewards: Tensor, groups: Groups) -> Tensor:
    """Successes in the row's group. [B] float64."""
    if not bool(((rewards == 0) | (rewards == 1)).all()):
        found = sorted(set(rewards.tolist()))[:5]
        raise ValueError(
            f"this advantage counts successes: rewards must be 0 or 1, got {found}; let the reward "
            "give nothing else, or choose a train.alg_name that takes any number"
        )
    return groups.sum(rewards)


def mean_normalize(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    maxrl_order: int | None = MAXRL_ORDER.default,
    eps: float = 1e-6,
) -> Tensor:
    """The reward relative to the group's success rate: towards maximum likelihood of right answers.

    A_i = (R_i - mean) / (mean + eps): with c of G right, G / c - 1 or -1; 0 without a success

    Its expectation is sum_{k < G} 1/k * gradient of pass@k, which for G to infinity is the gradient
    of log p. With maxrl_order T the sum ends at T, of which G - 1 is the above and 1 is
    `leave_one_out`:

    A_i = R_i * sum_{k < T} miss_i(k) - (1 - miss_i(T))

    miss_i(k): the chance that k draws from the other rows, without replacement, are all wrong.

    Args:
        rewards, group_ids: [B], as in the module's docstring; rewards 0 or 1.
        maxrl_order: T, at most G - 1; None: G - 1.
        eps: added to the mean, where T is None.

    Returns:
        [B].

    Raises:
        ValueError: a reward is neither 0 nor 1.

    Source: MaxRL, arXiv:2602.02710; the estimate for T < G - 1 is oxRL's, unbiased as that is.
    """
    groups = Groups.of(group_ids)
    successes = _successes(rewards, groups)
    if maxrl_order is not None:
        return in_dtype_of(rewards, _truncated(rewards, successes, groups.size - 1, maxrl_order))
    rate = successes / groups.size
    centered = group_center(rewards.double(), group_ids)
    return in_dtype_of(rewards, centered / (rate + eps))


def _truncated(rewards: Tensor, successes: Tensor, others: Tensor, order: int) -> Tensor:
    """The advantages of `mean_normalize` with a maxrl_order, of rows with so many others. [B]."""
    right = successes - rewards.double()
    total = torch.zeros_like(others)
    for drawn in range(order):
        miss = failure_chance(others, right, k=drawn)
        total = total + torch.where(others > drawn, miss, 0.0)
    return rewards * total - (1 - failure_chance(others, right, k=order))


def failure_chance(others: Tensor, successes: Tensor, *, k: int) -> Tensor:
    """Probability that k draws without replacement are all wrong.

    Args:
        others: [B] float64, rows to draw from.
        successes: [B] float64, how many of them are right.
        k: draws.

    Returns:
        [B] float64.
    """
    chance = torch.ones_like(others, dtype=torch.float64)
    for drawn in range(k):
        wrong = (others - successes - drawn).clamp(min=0) / (others - drawn).clamp(min=1)
        chance = chance * torch.where(others > drawn, wrong, (successes == 0).double())
    return chance


def pass_at_k_rewards(rewards: Tensor, group_ids: Tensor, *, pass_k: int) -> Tensor:
    """Compute each row's contribution to the pass@k of its group.

    s_i = k/n for a right row, k/n * pass@(k-1) of the other rows for a wrong one

    sum_i s_i * grad logprobs_i is an unbiased estimate of the gradient of pass@k; for k = 1, s_i =
    R_i / n.

    Args:
        rewards, group_ids: [B], as in the module's docstring; rewards 0 or 1.
        pass_k: k, at least 1; a group of n < k rows is taken for n tries.

    Returns:
        [B] float64.

    Raises:
        ValueError: a reward is neither 0 nor 1.

    Source: PKPO, arXiv:2505.15201.
    """
    groups = Groups.of(group_ids)
    successes = _successes(rewards, groups)
    reached = 1 - failure_chance(groups.size - 1, successes, k=pass_k - 1)
    tries = groups.size.clamp(max=pass_k)
    return tries / groups.size * torch.where(rewards == 1, 1.0, reached)


def pass_at_k_advantage(
    rewards: Tensor, group_ids: Tensor, *, pass_k: int = PASS_K.default
) -> Tensor:
    """Contribution to the group's pass@k, minus what the other rows would reach without this one.

    A_i = n * s_i - mean over the other rows j of n_-i * s_j, computed without row i

    The baseline knows nothing of row i, so the estimate stays unbiased; for k = 1 this is
    `leave_one_out`.

    Args:
        rewards, group_ids: [B], as in the module's docstring; rewards 0 or 1.
        pass_k: k, at least 1; a group of n < k rows is taken for n tries.

    Returns:
        [B].

    Raises:
        ValueError: a reward is neither 0 nor 1.

    Source: PKPO, arXiv:2505.15201, with its leave-one-out baseline.
    """
    groups = Groups.of(group_ids)
    successes = _successes(rewards, groups)
    scores = groups.size * pass_at_k_rewards(rewards, group_ids, pass_k=pass_k)
    others = groups.size - 1
    right = successes - rewards
    reached = 1 - failure_chance((others - 1).clamp(min=0), right, k=pass_k - 1)
    tries = groups.size.clamp(max=pass_k)
    baseline = tries * (right + (others - right) * reached) / others.clamp(min=1)
    advantages = torch.where(groups.flat(rewards), 0.0, scores - baseline)
    return in_dtype_of(rewards, advantages)


def top_gap(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Lead of the group's single best row over the second; 0 for all others.

    A_i = (best - second best) / (std + eps)

    Args:
        rewards, group_ids: [B], as in the module's docstring; any rewards.
        eps: added to the standard deviation.

    Returns:
        [B].

    Source: pass@k training, arXiv:2503.19595; verl `grpo_passk`.
    """
    check_rewards(rewards, group_ids)
    groups = Groups.of(group_ids)
    is_best = rewards.double() == groups.extreme(rewards, "amax")
    second = groups.extreme(torch.where(is_best, -torch.inf, rewards.double()), "amax")
    alone = is_best & (groups.sum(is_best) == 1) & ~groups.flat(rewards)
    gap = (rewards.double() - second) / (groups.std(rewards) + eps)
    return in_dtype_of(rewards, torch.where(alone, gap, 0.0))
