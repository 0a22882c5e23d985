"""Advantages that compare parts of a reward, or turns of episodes, within a group.

Args of every estimator are those of group_advantages.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.group_advantages import group_normalize, in_dtype_of
from oxrl.functional.masks import require_same_shape


def group_normalize_parts(
    part_rewards: Tensor, part_weights: Tensor, group_ids: Tensor, *, eps: float = 1e-8
) -> Tensor:
    """Each part of the reward in standard deviations of its own, added up, scaled over the batch.

    A_ik = (r_ik - mean of the group) / (std of the group + eps) for every part k
    S_i  = sum over k of weight_k * A_ik
    A_i  = (S_i - mean of the batch) / (std of the batch + eps), unbiased standard deviations

    Parts of different spread count by their weights, and responses whose parts differ are told
    apart although the sums of their parts are equal.

    Args:
        part_rewards: [B, K], NaN where a response has no such part.
        part_weights: [K].
        group_ids: [B] int64, shared by the rows of one prompt.
        eps: added to both standard deviations.

    Returns:
        [B]. A response without a part is left out of the comparison of that part and gets 0 of it.

    Raises:
        ValueError: shapes differ, or a part is infinite.

    Source: GDPO, arXiv:2601.05242; NVlabs/GDPO, trl-GDPO, grpo_trainer.py. Deviations: a part whose
    rewards are equal in a group gives exactly 0 there, and so do parts that cancel up to 1e-6 of
    the weights; eps is 1e-8, their code has 1e-4; a missing part is compared with nothing, where
    their code takes it for 0.
    """
    if part_rewards.ndim != 2 or part_weights.shape != part_rewards.shape[1:]:
        found = f"{tuple(part_rewards.shape)} and {tuple(part_weights.shape)}"
        raise ValueError(f"part_rewards and part_weights must be [B, K] and [K], got {found}")
    total = torch.zeros_like(part_rewards[:, 0], dtype=torch.float64)
    for rewards, weight in zip(part_rewards.double().unbind(1), part_weights, strict=True):
        known = ~rewards.isnan()
        total[known] += weight * group_normalize(rewards[known], group_ids[known], eps=eps)
    if len(total) < 2:
        return in_dtype_of(part_rewards, torch.zeros_like(total))
    # What parts that cancel leave of each other is rounding, and must not be scaled up; the mean is
    # 0 but for rounding, which must not reach rows that teach nothing.
    nothing = total.abs() <= 1e-6 * part_weights.abs().sum()
    total = total.masked_fill(nothing, 0.0)
    std, mean = torch.std_mean(total)
    scaled = ((total - mean) / (std + eps)).masked_fill(nothing, 0.0)
    return in_dtype_of(part_rewards, scaled)


def turn_normalize(
    token_rewards: Tensor,
    mask: Tensor,
    turns: Tensor,
    group_ids: Tensor,
    *,
    turn_gamma: float = 1.0,
    eps: float = 1e-8,
) -> Tensor:
    """Every turn's return to go, in standard deviations from the mean of its group's k-th turns.

    A_ik = (G_ik - mean) / (std + eps),  G_ik = r_ik + turn_gamma * G_i,k+1

    over the episodes i of the group that have a turn k; r_ik sums the rewards of that turn's
    tokens. With one turn per episode it is `group_normalize`.

    Args:
        token_rewards: [B, T].
        mask: [B, T] bool, trained tokens.
        turns: [B, T] int64, the turn in which each of them was sampled, from 0.
        group_ids: [B].
        turn_gamma: discount from a turn to the next, in [0, 1].
        eps: added to the standard deviation.

    Returns:
        [B, T], the advantage of its turn on every trained token.

    Raises:
        ValueError: shapes differ.

    Source: the step-relative advantage of GiGPO, arXiv:2505.10978, Eq. 6 and 7, with the number of
    the turn in the place of the anchor state.
    """
    require_same_shape(token_rewards=token_rewards, mask=mask, turns=turns)
    of_turn = torch.where(mask, turns, 0)
    last = int(of_turn.amax()) if of_turn.numel() else 0
    nothing = torch.zeros(len(mask), last + 1, dtype=torch.float64, device=mask.device)
    given = token_rewards.detach().double()
    rewards = torch.where(mask, given, 0.0)
    returns = nothing.scatter_add(1, of_turn, rewards)
    tokens = nothing.scatter_add(1, of_turn, mask.double())
    exists = tokens > 0
    for turn in reversed(range(last)):
        following = returns[:, turn + 1]
        returns[:, turn] += turn_gamma * following
    # Turns of one number in one group are a group.
    numbers = torch.arange(last + 1, device=mask.device)
    firsts = group_ids[:, None] * (last + 1)
    same_turn = firsts + numbers
    compared = group_normalize(returns[exists], same_turn[exists], eps=eps)
    scores = nothing.masked_scatter(exists, compared.double())
    of_token = scores.gather(1, of_turn)
    advantages = torch.where(mask, of_token, 0.0)
    return in_dtype_of(token_rewards, advantages)
