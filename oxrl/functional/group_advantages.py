"""Advantages that compare the responses to one prompt: one reward in, one advantage out per row.

Args of every estimator: rewards [B] finite (else ValueError), one per response; group_ids [B]
int64, shared by the rows of one prompt. Returns [B]. Statistics are float64. A group of one, and a
group whose rewards are equal, teach nothing and get exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from oxrl.functional.advantage_inputs import AdvantageInputs, AdvantagesAndReturns, Estimator
from oxrl.functional.masks import broadcast, in_dtype_of, require_same_shape
from oxrl.tables.numbers import PASS_K


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
        """Whether a group's values are equal up to rounding, or there is only one.

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


def _check_rewards(rewards: Tensor, group_ids: Tensor) -> None:
    """Refuse rewards that are not finite, or not one per row."""
    require_same_shape(rewards=rewards, group_ids=group_ids)
    if rewards.ndim != 1:
        raise ValueError(f"rewards must be [B], one per response, got shape {tuple(rewards.shape)}")
    bad = (~rewards.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"rewards of rows {bad[:8]} are not finite; "
            "drop unscored rows before computing advantages"
        )


def group_center(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward minus the group's mean: no standard deviation, so no bias towards some difficulty.

    A_i = R_i - mean of the group

    Args:
        rewards, group_ids: [B], as in the module's docstring.

    Returns:
        [B].

    Source: Dr.GRPO, arXiv:2503.20783.
    """
    _check_rewards(rewards, group_ids)
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
    _check_rewards(rewards, group_ids)
    groups = Groups.of(group_ids)
    baseline = groups.sum(rewards.double() * lengths) / groups.sum(lengths).clamp(min=1)
    centered = torch.where(groups.flat(rewards), 0.0, rewards.double() - baseline)
    return in_dtype_of(rewards, centered)


# Advantages for more than one try: rewards are 0 or 1, else ValueError, but for `top_gap`.


def _successes(rewards: Tensor, groups: Groups) -> Tensor:
    """Successes in the row's group. [B] float64."""
    if not bool(((rewards == 0) | (rewards == 1)).all()):
        found = sorted(set(rewards.tolist()))[:5]
        raise ValueError(
            f"this advantage counts successes: rewards must be 0 or 1, got {found}; let the reward "
            "give nothing else, or choose a train.alg_name that takes any number"
        )
    return groups.sum(rewards)


def mean_normalize(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """The reward relative to the group's success rate: towards maximum likelihood of right answers.

    A_i = (R_i - mean) / (mean + eps): with c of G right, G / c - 1 or -1; 0 without a success

    Its expectation is sum_{k < G} 1/k * gradient of pass@k, which for G to infinity is the gradient
    of log p.

    Args:
        rewards, group_ids: [B], as in the module's docstring; rewards 0 or 1.
        eps: added to the mean.

    Returns:
        [B].

    Raises:
        ValueError: a reward is neither 0 nor 1.

    Source: MaxRL, arXiv:2602.02710.
    """
    groups = Groups.of(group_ids)
    rate = _successes(rewards, groups) / groups.size
    centered = group_center(rewards.double(), group_ids)
    return in_dtype_of(rewards, centered / (rate + eps))


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
    """What each row contributes to the group's pass@k.

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
    _check_rewards(rewards, group_ids)
    groups = Groups.of(group_ids)
    is_best = rewards.double() == groups.extreme(rewards, "amax")
    second = groups.extreme(torch.where(is_best, -torch.inf, rewards.double()), "amax")
    alone = is_best & (groups.sum(is_best) == 1) & ~groups.flat(rewards)
    gap = (rewards.double() - second) / (groups.std(rewards) + eps)
    return in_dtype_of(rewards, torch.where(alone, gap, 0.0))


def of_rows(x: AdvantageInputs, row_advantages: Tensor) -> AdvantagesAndReturns:
    """An outcome advantage on every trained token of its row, as a cell gives it.

    Args:
        x: what the cell was given.
        row_advantages: [B].

    Returns:
        Advantages [B, T], and nothing for a critic.
    """
    return broadcast(row_advantages, x.response_mask), None


def of_rewards(estimate: Callable[[Tensor, Tensor], Tensor]) -> Estimator:
    """The cell of an estimator of this file that reads rewards and groups only.

    Args:
        estimate: of rewards [B] and group ids [B], advantages [B].

    Returns:
        The estimator on the whole batch of a step, for `ADVANTAGES`.
    """

    def cell(x: AdvantageInputs) -> AdvantagesAndReturns:
        return of_rows(x, estimate(x.rewards, x.group_ids))

    return cell
