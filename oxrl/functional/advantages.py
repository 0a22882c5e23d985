"""Advantages: how much better a token did than expected. Always detached, statistics always in
float64.

Estimators on tokens, and `ADVANTAGES`, which gives these and the row estimators of
group_advantages.py one signature. All [B, T] over the whole optimizer step, never a micro-batch;
results are zero where masked, in at least float32. ValueError where shapes differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import oxrl.functional.group_advantages as groups
from oxrl.functional.masks import at_least_float32, fill_masked, masked_values, require_same_shape

SCAN_CHUNK = 128
MAX_TEACHER_GAP = 10.0


def teacher_gap(old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """A_t = teacher_logprobs - old_logprobs, at most 10 in size: minus the k1 estimate of
    KL(student || teacher).

    As the detached advantage of a policy gradient its expectation is the per-token gradient of that
    KL. The same difference used as a differentiable loss would have expected gradient 0. Both in
    nats of the sampled tokens.
    Source: on-policy distillation; GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543.
    """
    require_same_shape(old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    gap = fill_masked(teacher_logprobs.detach(), mask) - fill_masked(old_logprobs.detach(), mask)
    return gap.clamp(-MAX_TEACHER_GAP, MAX_TEACHER_GAP)


def broadcast(row_advantages: Tensor, response_mask: Tensor) -> Tensor:
    """[B] to [B, T]: an outcome advantage belongs to every trained token of its row; 0
    elsewhere.
    """
    return torch.where(response_mask, row_advantages[:, None], 0.0)


def suffix_scan(x: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + decay * y_{t+1} along the rows of x [B, T], in chunks of one triangular matmul;
    decay [B] or [1].

    Never divides by powers of the decay: 0.95**8000 underflows.
    """
    result = torch.empty_like(x)
    steps = torch.arange(SCAN_CHUNK, device=x.device)
    distance = (steps[:, None] - steps[None, :]).clamp(
        min=0
    )  # [from, to], how far `from` lies behind `to`
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


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap: Tensor | None = None,
    *,
    gamma: float = 1.0,
    gae_lambda: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the trained tokens k = 1..n of each row: advantages and
    returns, [B, T].

    delta_k = R_k + gamma * V_{k+1} - V_k
    A_k     = delta_k + gamma * lambda * A_{k+1},   A_{n+1} = 0
    return_k = A_k + V_k
    V_{n+1} = 0 where the response ended, `bootstrap` where it was cut and the task goes on.

    Tokens outside the mask (prompt, tool output, padding) are skipped, not zeroed: they are part of
    the transition between two actions. A reward on such a token counts for the trained token before
    it.
    Source: Schulman et al. 2016, arXiv:1506.02438, Eq. 16. Skipping instead of zeroing: the masked
    values of a tool call would otherwise enter as spurious jumps (0.4125 instead of 0.4605 in the
    worked example of the tests).

    Args: token_rewards [B, T], zero or NaN where there is none; values [B, T], values[b, t] =
    V(tokens[b, :t]); bootstrap [B], 0 for rows that ended, None for all 0; gamma and gae_lambda in
    [0, 1], else ValueError, where a tensor [B] of lambdas gives every row its own.
    """
    require_same_shape(token_rewards=token_rewards, values=values, mask=mask)
    decays = torch.as_tensor(gae_lambda, dtype=torch.float64, device=values.device).reshape(-1)
    if not 0 <= gamma <= 1 or bool(((decays < 0) | (decays > 1)).any()):
        raise ValueError(
            f"gamma and gae_lambda must lie in [0, 1], got gamma={gamma}, gae_lambda={gae_lambda}"
        )
    order = torch.argsort(
        (~mask).to(torch.int8), dim=1, stable=True
    )  # [B, T], masked-in tokens to the front
    filled = mask.gather(1, order)  # [B, T], the slots they fill

    action = (
        mask.long().cumsum(1) - 1
    )  # index of the trained token at or before each position, -1 before the first
    rewards = torch.where(action >= 0, token_rewards.detach().double().nan_to_num(nan=0.0), 0.0)
    rewards = torch.zeros_like(rewards).scatter_add_(
        1, action.clamp(min=0), rewards
    )  # [B, T], compressed

    value = torch.where(
        filled, values.detach().double().gather(1, order), 0.0
    )  # [B, T], compressed
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    if bootstrap is not None:
        last = filled & (filled.sum(1, keepdim=True) == filled.cumsum(1))
        following = torch.where(last, bootstrap.detach().double()[:, None], following)
    delta = torch.where(filled, rewards + gamma * following - value, 0.0)
    compressed = suffix_scan(delta, gamma * decays)

    dtype = at_least_float32(values).dtype
    advantages = fill_masked(torch.zeros_like(compressed).scatter_(1, order, compressed), mask)
    return advantages.to(dtype), fill_masked(advantages + values.detach(), mask).to(dtype)


def length_adaptive_lambda(mask: Tensor, *, length_alpha: float = 0.05) -> Tensor:
    """lambda = 1 - 1 / (length_alpha * n) per row, at least 0: long responses need longer traces.
    [B] float64.

    Source: VAPO, arXiv:2504.05118.
    """
    return 1 - 1 / (length_alpha * mask.sum(1).double()).clamp(min=1.0)


def whiten(advantages: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(A - mean) / sqrt(var + eps) over all trained tokens of the optimizer step, unbiased
    variance.

    Source: PPO practice (arXiv:2005.12729); verl `masked_whiten`. Deviations: fewer than two tokens
    are returned as they are; values that are equal up to rounding (standard deviation below 1e-6 of
    the largest) are only centered, because dividing would blow rounding noise up to unit variance.
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
    """Everything an advantage may be computed from, over the whole rollout batch, invalid rows
    already removed.

    rewards [B]; token_rewards [B, T], the same rewards placed on tokens; response_mask [B, T];
    group_ids [B]; values [B, T] and bootstrap [B] from the critic; truncated [B] bool, cut by the
    token limit; greedy_rewards [B], the reward of the prompt's greedy response; old_logprobs and
    teacher_logprobs [B, T] of the sampled tokens.
    """

    rewards: Tensor
    token_rewards: Tensor
    response_mask: Tensor
    group_ids: Tensor
    values: Tensor | None = None
    bootstrap: Tensor | None = None
    truncated: Tensor | None = None
    greedy_rewards: Tensor | None = None
    old_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None

    def need(self, name: str) -> Tensor:
        """The field `name`, which the chosen advantage cannot do without."""
        tensor = getattr(self, name)
        if tensor is None:
            raise ValueError(f"this advantage needs {name}, which nothing in this run computes")
        return tensor


Estimator = Callable[..., tuple[Tensor, Tensor | None]]


def _of_rows(estimate: Callable[..., Tensor]) -> Estimator:
    return lambda x, **numbers: (broadcast(estimate(x, **numbers), x.response_mask), None)


def _from_rows(estimate: Callable[..., Tensor]) -> Estimator:
    return _of_rows(lambda x, **numbers: estimate(x.rewards, x.group_ids, **numbers))


def _whitened(estimate: Estimator) -> Estimator:
    return lambda x, **numbers: (whiten(estimate(x, **numbers)[0], x.response_mask), None)


def _gae(
    x: AdvantageInputs,
    *,
    gamma: float,
    whiten: bool,
    bootstrap_on_truncation: bool,
    gae_lambda: float = 1.0,
    length_alpha: float | None = None,
) -> tuple[Tensor, Tensor]:
    values, bootstrap = x.need("values"), None
    if bootstrap_on_truncation:
        bootstrap = torch.where(x.need("truncated"), x.need("bootstrap"), 0.0)
    trace = (
        gae_lambda
        if length_alpha is None
        else length_adaptive_lambda(x.response_mask, length_alpha=length_alpha)
    )
    advantages, returns = gae(
        x.token_rewards, values, x.response_mask, bootstrap, gamma=gamma, gae_lambda=trace
    )
    if length_alpha is not None:
        _, returns = gae(
            x.token_rewards, values, x.response_mask, bootstrap, gamma=gamma, gae_lambda=1.0
        )
    return (_whiten(advantages, x.response_mask) if whiten else advantages), returns


_whiten = whiten


def _returns(x: AdvantageInputs, *, gamma: float) -> tuple[Tensor, None]:
    return gae(x.token_rewards, torch.zeros_like(x.token_rewards), x.response_mask, gamma=gamma)[
        0
    ], None


def _greedy_baseline(x: AdvantageInputs) -> tuple[Tensor, None]:
    """A_i = R_i - R(greedy response to the same prompt, under the same weights). Source: ReMax,
    arXiv:2310.10505.
    """
    return broadcast(x.rewards - x.need("greedy_rewards"), x.response_mask), None


def _teacher_gap(x: AdvantageInputs, *, teacher_coeff: float = 1.0) -> tuple[Tensor, None]:
    return teacher_coeff * teacher_gap(
        x.need("old_logprobs"), x.need("teacher_logprobs"), x.response_mask
    ), None


def _reward_and_teacher(x: AdvantageInputs, *, teacher_coeff: float = 1.0) -> tuple[Tensor, None]:
    """`group_normalize` of the row plus teacher_coeff * `teacher_gap` of the token. Source: KDRL,
    arXiv:2506.02208.
    """
    rows = broadcast(groups.group_normalize(x.rewards, x.group_ids), x.response_mask)
    return rows + _teacher_gap(x, teacher_coeff=teacher_coeff)[0], None


# name -> (AdvantageInputs, **numbers of PARAMETERS) -> advantages [B, T], returns [B, T] for the
# critic or None.
ADVANTAGES: dict[str, Estimator] = {
    "returns": _returns,
    "whitened_returns": _whitened(_returns),
    "batch_center": _of_rows(
        lambda x: groups.group_center(x.rewards, torch.zeros_like(x.group_ids))
    ),
    "gae": _gae,
    "gae_length_adaptive": _gae,
    "group_normalize": _from_rows(groups.group_normalize),
    "group_center": _from_rows(groups.group_center),
    "group_center_batch_std": _from_rows(groups.group_center_batch_std),
    "group_center_rescaled": _from_rows(groups.group_center_rescaled),
    "group_center_whitened": _whitened(_from_rows(groups.group_center)),
    "leave_one_out": _from_rows(groups.leave_one_out),
    "greedy_baseline": _greedy_baseline,
    "length_weighted_center": _of_rows(
        lambda x: groups.length_weighted_center(x.rewards, x.group_ids, x.response_mask.sum(1))
    ),
    "mean_normalize": _from_rows(groups.mean_normalize),
    "pass_at_k": _from_rows(groups.pass_at_k_advantage),
    "top_gap": _from_rows(groups.top_gap),
    "teacher_gap": _teacher_gap,
    "group_normalize_teacher": _reward_and_teacher,
}
