"""Advantages for more than one try: pass@k, its maximum-likelihood limit, and the top-two gap.

Arguments and returns: group_advantages.py. Rewards are 0 or 1, else ValueError, but for `top_gap`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.group_advantages import Groups, group_center, group_normalize
from oxrl.functional.masks import at_least_float32


def _successes(rewards: Tensor, group_ids: Tensor) -> tuple[Groups, Tensor]:
    """Groups and, per row, its group's count of successes."""
    if not bool(((rewards == 0) | (rewards == 1)).all()):
        found = sorted(set(rewards.tolist()))[:5]
        raise ValueError(f"this advantage counts successes: rewards must be 0 or 1, got {found}")
    groups = Groups.of(group_ids)
    return groups, groups.sum(rewards)


def mean_normalize(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = (R_i - mean) / (mean + eps), 0 in groups without a success: with c of G right, G / c - 1 or -1.

    Its expectation is sum_{k < G} 1/k * gradient of pass@k, which for G to infinity is the gradient of log p: maximum
    likelihood of right answers.

    Source: MaxRL, arXiv:2602.02710.
    """
    groups, _ = _successes(rewards, group_ids)
    advantages = group_center(rewards.double(), group_ids) / (groups.mean(rewards) + eps)
    return advantages.to(at_least_float32(rewards).dtype)


def failure_chance(others: Tensor, successes: Tensor, *, k: int) -> Tensor:
    """Probability that k draws without replacement among `others` rows, `successes` of them right, are all wrong."""
    chance = torch.ones_like(others, dtype=torch.float64)
    for drawn in range(k):
        wrong = (others - successes - drawn).clamp(min=0) / (others - drawn).clamp(min=1)
        chance = chance * torch.where(others > drawn, wrong, (successes == 0).double())
    return chance


def pass_at_k_rewards(rewards: Tensor, group_ids: Tensor, *, pass_k: int) -> Tensor:
    """s_i = k/n for a right row, k/n * pass@(k-1) of the other rows for a wrong one, 1 <= k <= group size; float64.

    sum_i s_i * grad logprobs_i is an unbiased estimate of the gradient of pass@k; for k = 1, s_i = R_i / n.

    Source: PKPO, arXiv:2505.15201.
    """
    groups, successes = _successes(rewards, group_ids)
    reached = 1 - failure_chance(groups.size - 1, successes, k=pass_k - 1)
    return pass_k / groups.size * torch.where(rewards == 1, 1.0, reached)


def pass_at_k_advantage(rewards: Tensor, group_ids: Tensor, *, pass_k: int) -> Tensor:
    """A_i = n * s_i - mean over the other rows j of n_-i * s_j, computed without row i: PKPO with its baseline.

    The baseline knows nothing of row i, so the estimate stays unbiased; for k = 1 this is `leave_one_out`.

    Source: PKPO, arXiv:2505.15201, with its leave-one-out baseline.
    """
    groups, successes = _successes(rewards, group_ids)
    scores = groups.size * pass_at_k_rewards(rewards, group_ids, pass_k=pass_k)
    others, right = groups.size - 1, successes - rewards
    reached = 1 - failure_chance((others - 1).clamp(min=0), right, k=pass_k - 1)
    baseline = pass_k * (right + (others - right) * reached) / others.clamp(min=1)
    return torch.where(groups.flat(rewards), 0.0, scores - baseline).to(at_least_float32(rewards).dtype)


def top_gap(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(best - second best) / (std + eps) for the group's best row, 0 for all others; any rewards.

    Source: pass@k training, arXiv:2503.19595; verl `grpo_passk`.
    """
    groups = Groups.of(group_ids)
    best = groups.extreme(rewards, "amax")
    is_best = rewards.double() == best
    second = groups.extreme(torch.where(is_best, -torch.inf, rewards.double()), "amax")
    alone = is_best & (groups.sum(is_best) == 1) & ~groups.flat(rewards)
    # z-scores differ by (best - second) / (std + eps)
    normalized = group_normalize(rewards.double(), group_ids, eps=eps)
    below = groups.extreme(torch.where(rewards.double() == second, normalized, -torch.inf), "amax")
    return torch.where(alone, normalized - below, 0.0).to(at_least_float32(rewards).dtype)
