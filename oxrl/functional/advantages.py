"""Advantages: how much better a token did than expected. Always detached, statistics always in float64.

Group functions take one reward per row and return one advantage per row; `broadcast` spreads it over the row's trained
tokens. `gae` works on tokens. `ADVANTAGES` gives all of them one signature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oxrl.functional.masks import at_least_float32, fill_masked, masked_values, require_same_shape

SCAN_CHUNK = 128


@dataclass(frozen=True)
class Groups:
    """Rows of equal `group_ids`: `index` [B] numbers the groups 0..P-1, `count` [P] float64 counts their rows."""

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
        return start.scatter_reduce_(0, self.index, x.double(), kind, include_self=False)[self.index]

    @property
    def size(self) -> Tensor:
        """Rows in the group, per row. [B] float64."""
        return self.count[self.index]

    def flat(self, x: Tensor) -> Tensor:
        """[B] bool: the group's values are equal up to rounding (1e-6 of the mean), or there is only one.

        Equal rewards such as 0.1 have a float mean that differs in the last bit, which a division by a standard
        deviation of 1e-9 turns into advantages of 0.4; such a group must teach nothing.
        """
        spread = self.extreme(x, "amax") - self.extreme(x, "amin")
        return (self.size < 2) | (spread <= 1e-6 * self.mean(x).abs().clamp(min=1.0))


def _check_rewards(rewards: Tensor, group_ids: Tensor) -> None:
    require_same_shape(rewards=rewards, group_ids=group_ids)
    if rewards.ndim != 1:
        raise ValueError(f"rewards must be [B], one per response, got shape {tuple(rewards.shape)}")
    bad = (~rewards.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"rewards of rows {bad[:8]} are not finite; drop unscored rows before computing advantages")


def group_center(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = R_i - mean of the group: no division by the standard deviation, so no difficulty bias.

    Source: Dr.GRPO, arXiv:2503.20783.

    Args:
        rewards: [B] finite, one per response.
        group_ids: [B] int64; rows of one prompt share an id.

    Returns:
        [B] advantages; exactly 0 in groups of one and in groups of equal rewards.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    _check_rewards(rewards, group_ids)
    groups = Groups.of(group_ids)
    centered = torch.where(groups.flat(rewards), 0.0, rewards.double() - groups.mean(rewards))
    return centered.to(at_least_float32(rewards).dtype)


def group_normalize(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-8) -> Tensor:
    """A_i = (R_i - mean) / (std + eps) with the group's mean and unbiased standard deviation.

    Source: GRPO, arXiv:2402.03300, section 4.1.2. Deviations: groups of equal rewards give exactly 0 (see
    `Groups.flat`); a group of one gives 0, because it has nothing to be compared with.

    Args:
        rewards: [B] finite, one per response.
        group_ids: [B] int64.
        eps: added to the standard deviation.

    Returns:
        [B] advantages; they sum to 0 in every group.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    centered = group_center(rewards.double(), group_ids)
    groups = Groups.of(group_ids)
    std = (groups.sum(centered.square()) / (groups.size - 1).clamp(min=1)).sqrt()
    return (centered / (std + eps)).to(at_least_float32(rewards).dtype)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = R_i - mean of the other rows of the group = G / (G - 1) * (R_i - mean): exactly unbiased.

    Source: RLOO, arXiv:2402.14740; Kool et al. 2019.

    Args and Returns: as `group_center`.
    """
    groups = Groups.of(group_ids)
    centered = group_center(rewards.double(), group_ids)
    return (centered * groups.size / (groups.size - 1).clamp(min=1)).to(at_least_float32(rewards).dtype)


def broadcast(row_advantages: Tensor, response_mask: Tensor) -> Tensor:
    """[B] to [B, T]: an outcome advantage belongs to every trained token of its row; 0 elsewhere."""
    return torch.where(response_mask, row_advantages[:, None], 0.0)


def suffix_scan(x: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + decay * y_{t+1} along the last axis, in chunks of one triangular matmul each.

    Never divides by powers of the decay: 0.95**8000 underflows.

    Args:
        x: [B, T].
        decay: [B] or [1], in [0, 1].

    Returns:
        [B, T].
    """
    result = torch.empty_like(x)
    steps = torch.arange(SCAN_CHUNK, device=x.device)
    distance = (steps[:, None] - steps[None, :]).clamp(min=0)  # [from, to], how far `from` lies behind `to`
    reaches = (steps[:, None] >= steps[None, :]).to(x.dtype)
    powers = decay.to(x.dtype)[:, None, None] ** distance * reaches  # [B or 1, C, C]
    carry = x.new_zeros(x.shape[0], 1)
    for end in range(x.shape[1], 0, -SCAN_CHUNK):
        start = max(end - SCAN_CHUNK, 0)
        size = end - start
        inner = torch.matmul(x[:, None, start:end], powers[:, :size, :size])[:, 0]
        behind = decay.to(x.dtype)[:, None] ** (size - steps[:size])
        result[:, start:end] = inner + behind * carry
        carry = result[:, start : start + 1]
    return result


def _compress(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Order [B, T] that moves masked-in tokens to the front of each row, and which slots they fill."""
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    return order, mask.gather(1, order)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap: Tensor | None = None,
    *,
    gamma: float = 1.0,
    gae_lambda: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the trained tokens k = 1..n of each row.

    delta_k = R_k + gamma * V_{k+1} - V_k
    A_k     = delta_k + gamma * lambda * A_{k+1},   A_{n+1} = 0
    return_k = A_k + V_k
    V_{n+1} = 0 where the response ended, `bootstrap` where it was cut and the task goes on.

    Tokens outside the mask (prompt, tool output, padding) are skipped, not zeroed: they are part of the transition
    between two actions. A reward on such a token counts for the trained token before it.

    Source: Schulman et al. 2016, arXiv:1506.02438, Eq. 16. Skipping instead of zeroing: the masked values of a tool
    call would otherwise enter as spurious jumps (0.4125 instead of 0.4605 in the worked example of the tests).

    Args:
        token_rewards: [B, T]; zero or NaN where there is none.
        values: [B, T], values[b, t] = V(tokens[b, :t]); read at masked-in positions only.
        mask: [B, T] bool, trained tokens.
        bootstrap: [B] value after the last token, 0 for rows that ended; None for all 0.
        gamma: discount per trained token, in [0, 1].
        gae_lambda: in [0, 1]; a tensor [B] gives every row its own.

    Returns:
        advantages [B, T] and returns [B, T], zero where masked, in at least float32.

    Raises:
        ValueError: shapes differ, gamma or lambda lies outside [0, 1].
    """
    require_same_shape(token_rewards=token_rewards, values=values, mask=mask)
    decays = torch.as_tensor(gae_lambda, dtype=torch.float64, device=values.device).reshape(-1)
    if not 0 <= gamma <= 1 or bool(((decays < 0) | (decays > 1)).any()):
        raise ValueError(f"gamma and gae_lambda must lie in [0, 1], got gamma={gamma}, gae_lambda={gae_lambda}")
    order, filled = _compress(mask)
    counts = mask.sum(1)  # [B]

    rewards = token_rewards.detach().double().nan_to_num(nan=0.0)
    action = mask.long().cumsum(1) - 1  # index of the trained token at or before each position, -1 before the first
    rewards = torch.where(action >= 0, rewards, 0.0)
    rewards = torch.zeros_like(rewards).scatter_add_(1, action.clamp(min=0), rewards)  # [B, T], compressed

    value = torch.where(filled, values.detach().double().gather(1, order), 0.0)  # [B, T], compressed
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    if bootstrap is not None:
        last = (torch.arange(mask.shape[1], device=mask.device) == counts[:, None] - 1) & filled
        following = torch.where(last, bootstrap.detach().double()[:, None], following)
    delta = torch.where(filled, rewards + gamma * following - value, 0.0)
    compressed = suffix_scan(delta, gamma * decays)

    dtype = at_least_float32(values).dtype
    advantages = torch.zeros_like(compressed).scatter_(1, order, compressed)
    advantages = fill_masked(advantages, mask)
    returns = fill_masked(advantages + values.detach(), mask)
    return advantages.to(dtype), returns.to(dtype)


def whiten(advantages: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(A - mean) / sqrt(var + eps) over all trained tokens of the optimizer step, unbiased variance.

    Source: PPO practice (arXiv:2005.12729); verl `masked_whiten`. Deviations: fewer than two tokens are returned as
    they are; values that are equal up to rounding (standard deviation below 1e-6 of the largest) are only centered,
    because dividing would blow rounding noise up to unit variance.

    Args:
        advantages: [B, T] of the whole optimizer step, never of a micro-batch.
        mask: [B, T] bool.
        eps: added to the variance.

    Returns:
        [B, T], zero where masked.
    """
    require_same_shape(advantages=advantages, mask=mask)
    values = masked_values(advantages, mask)
    if values.numel() < 2:
        return fill_masked(advantages, mask)
    variance, mean = torch.var_mean(values)
    noise = variance.sqrt() <= 1e-6 * values.abs().max()
    scale = torch.where(noise, torch.ones_like(variance), (variance + eps).rsqrt())
    whitened = fill_masked((advantages.double() - mean) * scale, mask)
    return whitened.to(at_least_float32(advantages).dtype)


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Everything an advantage may be computed from, over the whole rollout batch, invalid rows already removed.

    rewards [B]; token_rewards [B, T], the same rewards placed on tokens; response_mask [B, T]; group_ids [B];
    values [B, T] and bootstrap [B] from the critic; truncated [B] bool, cut by the token limit.
    """

    rewards: Tensor
    token_rewards: Tensor
    response_mask: Tensor
    group_ids: Tensor
    values: Tensor | None = None
    bootstrap: Tensor | None = None
    truncated: Tensor | None = None


def _from_rows(estimate: Callable[[Tensor, Tensor], Tensor]) -> Callable[[AdvantageInputs], tuple[Tensor, None]]:
    return lambda x: (broadcast(estimate(x.rewards, x.group_ids), x.response_mask), None)


def _gae(
    x: AdvantageInputs, *, gamma: float, gae_lambda: float, whiten: bool, bootstrap_on_truncation: bool
) -> tuple[Tensor, Tensor]:
    if x.values is None:
        raise ValueError("the gae advantage needs the critic's values")
    bootstrap = None
    if bootstrap_on_truncation:
        if x.bootstrap is None or x.truncated is None:
            raise ValueError("bootstrap_on_truncation needs the critic's bootstrap values and which rows were cut")
        bootstrap = torch.where(x.truncated, x.bootstrap, 0.0)
    advantages, returns = gae(x.token_rewards, x.values, x.response_mask, bootstrap, gamma=gamma, gae_lambda=gae_lambda)
    return (_whiten(advantages, x.response_mask) if whiten else advantages), returns


_whiten = whiten

# name -> (AdvantageInputs, **numbers of PARAMETERS) -> advantages [B, T], returns [B, T] for the critic or None.
ADVANTAGES: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "group_normalize": _from_rows(group_normalize),
    "group_center": _from_rows(group_center),
    "leave_one_out": _from_rows(leave_one_out),
    "gae": _gae,
}
