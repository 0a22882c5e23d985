"""Advantages: how much better a token did than expected, detached, with float64 statistics.

Estimators on tokens, and `ADVANTAGES`, which gives these and the row estimators of
group_advantages.py one signature. All [B, T] over the whole optimizer step, never a micro-batch;
results are zero where masked, in at least float32. ValueError where shapes differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import oxrl.functional.group_advantages as groups
import oxrl.functional.part_advantages as parts
import oxrl.functional.success_advantages as successes
from oxrl.functional.group_advantages import (
    AdvantageInputs,
    AdvantagesAndReturns,
    Estimator,
    in_dtype_of,
    of_rewards,
    of_rows,
)
from oxrl.functional.masks import (
    OptionalTensor,
    fill_masked,
    masked_values,
    require_same_shape,
)
from oxrl.functional.robust_advantages import iqr_normalize
from oxrl.tables.numbers import (
    BOOTSTRAP_ON_TRUNCATION,
    GAE_LAMBDA,
    GAMMA,
    LENGTH_ALPHA,
    PREFIX_COEFF,
    STEP_GAMMA,
    TEACHER_COEFF,
    TEACHER_COEFF_END,
    TEACHER_GAMMA,
    TEACHER_MEAN,
    TURN_GAMMA,
    TURN_LAMBDA,
    WHITEN,
)

SCAN_CHUNK = 128
MAX_TEACHER_GAP = 10.0


def teacher_gap(old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Measure how much likelier the teacher finds each token than the policy that sampled it.

    A_t = teacher_logprobs - old_logprobs, at most 10 in size

    This is minus the k1 estimate of KL(student || teacher): as the detached advantage of a policy
    gradient its expectation is the per-token gradient of that KL. The same difference used as a
    differentiable loss would have expected gradient 0.

    Args:
        old_logprobs, teacher_logprobs: [B, T] nats of the sampled tokens.
        mask: [B, T] bool, trained tokens.

    Returns:
        [B, T] nats, detached.

    Source: on-policy distillation; GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543.
    """
    require_same_shape(old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    teacher = fill_masked(teacher_logprobs.detach(), mask)
    gap = teacher - fill_masked(old_logprobs.detach(), mask)
    return gap.clamp(-MAX_TEACHER_GAP, MAX_TEACHER_GAP)


def teacher_return(gap: Tensor, mask: Tensor, *, gamma: float, mean: bool) -> Tensor:
    """Count for every token what the teacher says of all that follows from it.

    R_t = sum_{i>=t} gamma^(i-t) gap_i              i: trained tokens of the row
    mean: R_t / sum_{i>=t} gamma^(i-t)

    With gamma 1 its policy gradient is that of the KL of whole responses; with 0 of the sum of the
    tokens' KLs, as if those before them could not be helped.

    Args:
        gap: [B, T] nats, 0 where masked; see `teacher_gap`.
        mask: [B, T] bool, trained tokens.
        gamma: in [0, 1].
        mean: divide by what was counted.

    Returns:
        [B, T], 0 where masked.

    Source: MiniLLM, arXiv:2306.08543, equation 4 and, for the mean, length normalisation.
    """
    decays = torch.ones_like(gap).masked_fill(mask, gamma)
    found = varying_scan(gap, decays)
    if mean:
        found = found / varying_scan(mask.to(gap.dtype), decays)
    return torch.where(mask, found, 0.0)


def suffix_scan(x: Tensor, decay: Tensor) -> Tensor:
    """Sum every row from its end with a decay, in chunks of one triangular matrix product.

    y_t = x_t + decay * y_{t+1}

    Never divides by powers of the decay: 0.95**8000 underflows.

    Args:
        x: [B, T].
        decay: [B] or [1], in [0, 1].

    Returns:
        y [B, T], in the dtype of x.
    """
    result = torch.empty_like(x)
    steps = torch.arange(SCAN_CHUNK, device=x.device)
    # [from, to]: how far `from` lies behind `to`.
    distance = (steps[:, None] - steps[None, :]).clamp(min=0)
    reaches = (steps[:, None] >= steps[None, :]).to(x.dtype)
    decay = decay.to(x.dtype)[:, None]
    powers = decay[..., None] ** distance * reaches  # [B or 1, C, C]
    carry = x.new_zeros(x.shape[0], 1)
    for end in range(x.shape[1], 0, -SCAN_CHUNK):
        start = max(end - SCAN_CHUNK, 0)
        size = end - start
        chunk = x[:, None, start:end]
        inner = torch.matmul(chunk, powers[:, :size, :size])[:, 0]
        behind = decay ** (size - steps[:size])
        result[:, start:end] = inner + behind * carry
        carry = result[:, start : start + 1]
    return result


def varying_scan(x: Tensor, decays: Tensor) -> Tensor:
    """`suffix_scan` with a decay per position.

    y_t = x_t + decays_t * y_{t+1}

    Args:
        x, decays: [B, T]; decays in [0, 1].

    Returns:
        y [B, T], in the dtype of x.
    """
    result = torch.empty_like(x)
    decays = decays.to(x.dtype)
    carry = x.new_zeros(x.shape[0], 1)
    for end in range(x.shape[1], 0, -SCAN_CHUNK):
        start = max(end - SCAN_CHUNK, 0)
        inside = decays[:, start:end]
        size = end - start
        # [to, from]: the product of the decays of to, to + 1, ..., from - 1.
        square = torch.ones(size, size, device=x.device)
        ahead = square.triu(1).bool()
        before = inside[:, :-1]
        shifted = torch.nn.functional.pad(before, (1, 0), value=1.0)
        factors = torch.where(ahead, shifted[:, None, :], 1.0)
        products = factors.cumprod(2)
        reach = torch.where(ahead.T, 0.0, products)
        column = x[:, start:end, None]
        inner = torch.matmul(reach, column)[..., 0]
        to_end = reach[..., -1]
        last = inside[:, -1:]
        behind = to_end * last
        result[:, start:end] = inner + behind * carry
        carry = result[:, start : start + 1]
    return result


@dataclass(frozen=True, kw_only=True)
class TurnDecays:
    """Discounts at the ends of turns, where they are others than between two tokens of a turn.

    turns: [B, T] int64, the turn of each trained token. next_turn: [B] bool, cut where the next
    turn would begin; None: nowhere. gamma, trace: None where as within a turn.
    """

    turns: Tensor
    next_turn: OptionalTensor = None
    gamma: float | None = None
    trace: float | None = None

    def discounts(self, ends: Tensor, within: float) -> Tensor:
        """The discount after each token: `gamma` of this where a turn ends, else the one within a
        turn.

        Args:
            ends: [B, T] bool, of `ends`.
            within: the discount between two tokens of a turn, in [0, 1].

        Returns:
            [B, T] float64.
        """
        along = torch.full(ends.shape, within, dtype=torch.float64, device=ends.device)
        return along if self.gamma is None else torch.where(ends, self.gamma, along)

    def traces(self, ends: Tensor, within: Tensor) -> Tensor:
        """Lambda after each token: `trace` of this where a turn ends, else the one within a turn.

        Args:
            ends: [B, T] bool, of `ends`.
            within: [B], or [1] for all rows, lambda between two tokens of a turn, in [0, 1].

        Returns:
            [B, T], in the dtype of `within`.
        """
        along = within[:, None].expand(ends.shape)
        return along if self.trace is None else torch.where(ends, self.trace, along)

    def ends(self, order: Tensor, filled: Tensor) -> Tensor:
        """Find the trained tokens after which another turn begins.

        Args:
            order: [B, T] indices into each row, trained tokens first.
            filled: [B, T] bool, the places of `order` that hold a trained token.

        Returns:
            [B, T] bool.
        """
        turns = self.turns.gather(1, order)
        changes = turns[:, 1:] != turns[:, :-1]
        within = changes & filled[:, 1:]
        ends = torch.nn.functional.pad(within, (0, 1))
        if self.next_turn is not None:
            at_end = _last_filled(filled)
            cut = self.next_turn[:, None]
            ends = ends | (at_end & cut)
        return ends


def _decays_of(gamma: float, gae_lambda: float | Tensor, device: torch.device) -> Tensor:
    """Lambda as a tensor, [B] or [1] float64.

    Raises:
        ValueError: it or gamma is outside [0, 1].
    """
    decays = torch.as_tensor(gae_lambda, dtype=torch.float64, device=device).reshape(-1)
    outside = (decays < 0) | (decays > 1)
    if not 0 <= gamma <= 1 or bool(outside.any()):
        raise ValueError(
            f"gamma and gae_lambda must lie in [0, 1], got gamma={gamma}, gae_lambda={gae_lambda}"
        )
    return decays


def _last_filled(filled: Tensor) -> Tensor:
    """[B, T] bool: the last token that there is, of rows whose tokens stand first."""
    rank = filled.cumsum(1)
    count = filled.sum(1, keepdim=True)
    return filled & (rank == count)


def _rewards_of_actions(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """[B, T] float64: rewards of the trained tokens, which stand first; others count for the token
    before.
    """
    action = mask.long().cumsum(1) - 1  # the trained token at or before, -1 before the first
    rewards = token_rewards.detach().double().nan_to_num(nan=0.0)
    rewards = torch.where(action >= 0, rewards, 0.0)
    return torch.zeros_like(rewards).scatter_add_(1, action.clamp(min=0), rewards)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap: OptionalTensor = None,
    *,
    gamma: float = 1.0,
    gae_lambda: float | Tensor = 1.0,
    at_turns: TurnDecays | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the trained tokens k = 1..n of each row.

    delta_k = R_k + gamma * V_{k+1} - V_k
    A_k     = delta_k + gamma * lambda * A_{k+1},   A_{n+1} = 0
    return_k = A_k + V_k
    V_{n+1} = 0 where the response ended, `bootstrap` where it was cut and the task goes on.

    Tokens outside the mask (prompt, tool output, padding) are skipped: they belong to what lies
    between two actions, and zeros would enter as jumps. Their rewards count for the token before.

    Args:
        token_rewards: [B, T], zero or NaN where there is none.
        values: [B, T], values[b, t] = V(tokens[b, :t]).
        mask: [B, T] bool, trained tokens.
        bootstrap: [B], 0 for rows that ended; None for all 0.
        gamma: discount per trained token, in [0, 1].
        gae_lambda: in [0, 1]; a tensor [B] gives every row its own.
        at_turns: other values from one turn of an episode to the next; None: the same.

    Returns:
        Advantages and returns, [B, T], detached.

    Raises:
        ValueError: shapes differ, or gamma or a lambda is outside [0, 1].

    Source: Schulman et al. 2016, arXiv:1506.02438, Eq. 16.
    """
    require_same_shape(token_rewards=token_rewards, values=values, mask=mask)
    decays = _decays_of(gamma, gae_lambda, values.device)
    # Trained tokens are moved to the front of their row, scanned there, and moved back.
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    filled = mask.gather(1, order)
    rewards = _rewards_of_actions(token_rewards, mask)
    value = torch.where(filled, values.detach().double().gather(1, order), 0.0)
    following = torch.nn.functional.pad(value[:, 1:], (0, 1))
    if bootstrap is not None:
        last = _last_filled(filled)
        after = bootstrap.detach().double()
        following = torch.where(last, after[:, None], following)
    if at_turns is None:
        delta = torch.where(filled, rewards + gamma * following - value, 0.0)
        scanned = suffix_scan(delta, gamma * decays)
    else:
        ends = at_turns.ends(order, filled)
        discounts = at_turns.discounts(ends, gamma)
        delta = torch.where(filled, rewards + discounts * following - value, 0.0)
        scanned = varying_scan(delta, discounts * at_turns.traces(ends, decays))
    advantages = fill_masked(torch.zeros_like(scanned).scatter_(1, order, scanned), mask)
    returns = fill_masked(advantages + values.detach(), mask)
    return in_dtype_of(values, advantages), in_dtype_of(values, returns)


def optimal_token_baseline(
    token_rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    logprobs: Tensor,
    sum_p_squared: Tensor,
) -> Tensor:
    """The return to go minus the group's mean of returns at the same token, weighted by how far
    each response has pushed the logits by then.

    A_t = G_t - B_t,  B_t = sum_i W_it G_it / sum_i W_it over the group
    W_t = sum_{j <= t} (1 - 2 p_j + sum_v p_jv^2)

    A term of W is the squared norm of the gradient of a sampled token's logprob by the logits, and
    B nearly the baseline of least variance. t counts trained tokens. A token that no other response
    of its group has is given B = 0; groups of equal returns get exactly 0.

    Args:
        token_rewards: [B, T], zero or NaN where there is none.
        mask: [B, T] bool, trained tokens.
        group_ids: [B], shared by the responses to one prompt.
        logprobs: [B, T] nats, log p of the sampled tokens.
        sum_p_squared: [B, T], over the vocabulary.

    Returns:
        [B, T], detached; 0 where masked.

    Raises:
        ValueError: shapes differ.

    Source: OTB, arXiv:2602.07078; verl (verl/trainer/ppo/core_algos.py,
    compute_multi_turn_optimal_token_baseline_advantage). Deviations: groups of equal returns, and
    of one response, teach nothing; no weights against the sampler enter W.
    """
    require_same_shape(
        token_rewards=token_rewards, mask=mask, logprobs=logprobs, sum_p_squared=sum_p_squared
    )
    # Trained tokens to the front of their rows: those of one number stand in one column.
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
    filled = mask.gather(1, order)
    rewards = _rewards_of_actions(token_rewards, mask)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    p = fill_masked(logprobs.detach(), mask).double().exp()
    norms = (1 - 2 * p + fill_masked(sum_p_squared.detach(), mask)).clamp(min=0)
    energy = torch.where(filled, norms.gather(1, order).cumsum(1), 0.0)
    compared = groups.Groups.of(group_ids)

    def of_group(x: Tensor) -> Tensor:
        sums = x.new_zeros(len(compared.count), x.shape[1], dtype=torch.float64)
        return sums.index_add_(0, compared.index, x.double())[compared.index]

    baseline = of_group(energy * to_go) / of_group(energy).clamp(min=1e-8)
    baseline = torch.where(of_group(filled) > 1, baseline, 0.0)
    teaches = filled & ~compared.flat(rewards.sum(1))[:, None]
    advantages = torch.where(teaches, to_go - baseline, 0.0)
    in_place = torch.zeros_like(advantages).scatter_(1, order, advantages)
    return in_dtype_of(token_rewards, in_place)


def length_adaptive_lambda(mask: Tensor, *, length_alpha: float = LENGTH_ALPHA.default) -> Tensor:
    """GAE's lambda by the length of the row: long responses need longer traces.

    lambda = 1 - 1 / (length_alpha * n), at least 0, for a row of n trained tokens

    Args:
        mask: [B, T] bool, trained tokens.
        length_alpha: how soon lambda grows with length.

    Returns:
        [B] float64.

    Source: VAPO, arXiv:2504.05118.
    """
    return 1 - 1 / (length_alpha * mask.sum(1).double()).clamp(min=1.0)


def whiten(advantages: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Scale advantages to mean 0 and variance 1 over all trained tokens of the optimizer step.

    (A - mean) / sqrt(var + eps), unbiased variance

    Args:
        advantages: [B, T].
        mask: [B, T] bool, trained tokens.
        eps: added to the variance.

    Returns:
        [B, T], 0 where masked.

    Raises:
        ValueError: shapes differ.

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
    return in_dtype_of(advantages, whitened)


# The cells of `ADVANTAGES`: what each reads of `x`, the whole batch. The equations are in the
# functions that they call.


def _at_turns(
    x: AdvantageInputs, gamma: float | None, trace: float | None = None
) -> TurnDecays | None:
    """Discounts between turns, where there are turns and something is said of them."""
    if x.turns is None or (gamma is None and trace is None):
        return None
    return TurnDecays(turns=x.turns, next_turn=x.next_turn, gamma=gamma, trace=trace)


def _returns_cell(
    x: AdvantageInputs,
    *,
    gamma: float = GAMMA.default,
    turn_gamma: float | None = TURN_GAMMA.default,
) -> AdvantagesAndReturns:
    """Return to go: the discounted rewards that follow a token, `gae` without a critic."""
    nothing = torch.zeros_like(x.token_rewards)
    at_turns = _at_turns(x, turn_gamma)
    advantages, _ = gae(x.token_rewards, nothing, x.response_mask, gamma=gamma, at_turns=at_turns)
    return advantages, None


def _whitened_returns_cell(
    x: AdvantageInputs,
    *,
    gamma: float = GAMMA.default,
    turn_gamma: float | None = TURN_GAMMA.default,
) -> AdvantagesAndReturns:
    """`_returns_cell`, whitened over the batch."""
    returns, _ = _returns_cell(x, gamma=gamma, turn_gamma=turn_gamma)
    return whiten(returns, x.response_mask), None


def _batch_center_cell(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward minus the mean of the batch: `group_center` with one group."""
    one_group = torch.zeros_like(x.group_ids)
    return of_rows(x, groups.group_center(x.rewards, one_group))


def _whitened_if(wanted: bool, advantages: Tensor, mask: Tensor) -> Tensor:
    """`whiten` as a number of a cell."""
    if not wanted:
        return advantages
    return whiten(advantages, mask)


def _bootstrap_if(wanted: bool, x: AdvantageInputs) -> OptionalTensor:
    """The critic's value after the last token, for the rows that were cut."""
    if not wanted:
        return None
    return torch.where(x.need("truncated"), x.need("bootstrap"), 0.0)


def _gae_cell(
    x: AdvantageInputs,
    *,
    gamma: float = GAMMA.default,
    gae_lambda: float = GAE_LAMBDA.default,
    whiten: bool = WHITEN.default,
    bootstrap_on_truncation: bool = BOOTSTRAP_ON_TRUNCATION.default,
    turn_gamma: float | None = TURN_GAMMA.default,
    turn_lambda: float | None = TURN_LAMBDA.default,
) -> AdvantagesAndReturns:
    """`gae` with the critic's values; whitening leaves the returns alone."""
    values = x.need("values")
    mask = x.response_mask
    bootstrap = _bootstrap_if(bootstrap_on_truncation, x)
    advantages, returns = gae(
        x.token_rewards,
        values,
        mask,
        bootstrap,
        gamma=gamma,
        gae_lambda=gae_lambda,
        at_turns=_at_turns(x, turn_gamma, turn_lambda),
    )
    return _whitened_if(whiten, advantages, mask), returns


def _gae_length_adaptive_cell(
    x: AdvantageInputs,
    *,
    gamma: float = GAMMA.default,
    length_alpha: float = LENGTH_ALPHA.default,
    whiten: bool = WHITEN.default,
    bootstrap_on_truncation: bool = BOOTSTRAP_ON_TRUNCATION.default,
    turn_gamma: float | None = TURN_GAMMA.default,
) -> AdvantagesAndReturns:
    """`gae` with `length_adaptive_lambda` for the policy and lambda 1 for the critic's returns."""
    values = x.need("values")
    mask = x.response_mask
    bootstrap = _bootstrap_if(bootstrap_on_truncation, x)
    trace = length_adaptive_lambda(mask, length_alpha=length_alpha)
    given = (x.token_rewards, values, mask, bootstrap)
    at_turns = _at_turns(x, turn_gamma)
    advantages, _ = gae(*given, gamma=gamma, gae_lambda=trace, at_turns=at_turns)
    _, returns = gae(*given, gamma=gamma, gae_lambda=1.0, at_turns=at_turns)
    return _whitened_if(whiten, advantages, mask), returns


def _turn_normalize_cell(
    x: AdvantageInputs, *, turn_gamma: float | None = STEP_GAMMA.default
) -> AdvantagesAndReturns:
    """`turn_normalize` of the rewards of turns; without turns, a response is one."""
    turns = torch.zeros_like(x.response_mask, dtype=torch.int64) if x.turns is None else x.turns
    discount = 1.0 if turn_gamma is None else turn_gamma
    advantages = parts.turn_normalize(
        x.token_rewards, x.response_mask, turns, x.group_ids, turn_gamma=discount
    )
    return advantages, None


def _group_center_whitened_cell(x: AdvantageInputs) -> AdvantagesAndReturns:
    """`group_center` of the rewards, whitened over the batch."""
    centered, _ = of_rows(x, groups.group_center(x.rewards, x.group_ids))
    return whiten(centered, x.response_mask), None


def _greedy_baseline_cell(x: AdvantageInputs) -> AdvantagesAndReturns:
    """The reward minus that of the greedy response to the same prompt, under the same weights.

    A_i = R_i - R(greedy response)

    Source: ReMax, arXiv:2310.10505.
    """
    return of_rows(x, x.rewards - x.need("greedy_rewards"))


def _length_weighted_center_cell(x: AdvantageInputs) -> AdvantagesAndReturns:
    """`length_weighted_center` of the rewards, by trained tokens."""
    lengths = x.response_mask.sum(1)
    return of_rows(x, groups.length_weighted_center(x.rewards, x.group_ids, lengths))


def _group_normalize_parts_cell(x: AdvantageInputs) -> AdvantagesAndReturns:
    """`group_normalize_parts` of the parts of the reward."""
    part_rewards = x.need("part_rewards")
    part_weights = x.need("part_weights")
    return of_rows(x, parts.group_normalize_parts(part_rewards, part_weights, x.group_ids))


def _otb_cell(x: AdvantageInputs) -> AdvantagesAndReturns:
    """`optimal_token_baseline` by what the policy says before the update."""
    logprobs = x.need("policy_logprobs")
    squares = x.need("sum_p_squared")
    found = optimal_token_baseline(x.token_rewards, x.response_mask, x.group_ids, logprobs, squares)
    return found, None


def _none_cell(x: AdvantageInputs) -> AdvantagesAndReturns:
    """0 of every token: the loss reads none."""
    return torch.zeros_like(x.token_rewards), None


def _gap_of(x: AdvantageInputs) -> Tensor:
    """`teacher_gap` of the policy that the update starts from."""
    return teacher_gap(x.need("old_logprobs"), x.need("teacher_logprobs"), x.response_mask)


def _teacher_gap_cell(
    x: AdvantageInputs, *, teacher_coeff: float = TEACHER_COEFF.default
) -> AdvantagesAndReturns:
    """`teacher_gap` times teacher_coeff."""
    return teacher_coeff * _gap_of(x), None


def _teacher_return_cell(
    x: AdvantageInputs,
    *,
    teacher_gamma: float = TEACHER_GAMMA.default,
    teacher_mean: bool = TEACHER_MEAN.default,
) -> AdvantagesAndReturns:
    """`teacher_return` of `teacher_gap`."""
    gap = _gap_of(x)
    return teacher_return(gap, x.response_mask, gamma=teacher_gamma, mean=teacher_mean), None


def _teacher_prefix_gap_cell(
    x: AdvantageInputs, *, prefix_coeff: float = PREFIX_COEFF.default
) -> AdvantagesAndReturns:
    """`teacher_gap`, more of the tokens before which policy and teacher still agreed.

    A_t (1 + prefix_coeff (1 - sum_{i<t} |A_i| / sum_i |A_i|))

    Source: IW-OPD, arXiv:2606.22600.
    """
    gap = _gap_of(x)
    sizes = gap.abs()
    before = sizes.cumsum(1) - sizes
    share = before / sizes.sum(1, keepdim=True).clamp(min=torch.finfo(gap.dtype).tiny)
    return gap * (1 + prefix_coeff * (1 - share)), None


def _group_normalize_teacher_cell(
    x: AdvantageInputs,
    *,
    teacher_coeff: float = TEACHER_COEFF.default,
    teacher_coeff_end: float | None = TEACHER_COEFF_END.default,
) -> AdvantagesAndReturns:
    """`group_normalize` of the row plus teacher_coeff * `teacher_gap` of the token.

    The coefficient moves to teacher_coeff_end along a line over the steps of the run.

    Source: KDRL, arXiv:2506.02208.
    """
    outcome, _ = of_rows(x, groups.group_normalize(x.rewards, x.group_ids))
    end = teacher_coeff if teacher_coeff_end is None else teacher_coeff_end
    coeff = teacher_coeff + (end - teacher_coeff) * x.done
    return outcome + coeff * _gap_of(x), None


ADVANTAGES: dict[str, Estimator] = {
    **groups.GROUP_ADVANTAGES,
    "returns": _returns_cell,
    "whitened_returns": _whitened_returns_cell,
    "batch_center": _batch_center_cell,
    "gae": _gae_cell,
    "gae_length_adaptive": _gae_length_adaptive_cell,
    "group_normalize_parts": _group_normalize_parts_cell,
    "turn_normalize": _turn_normalize_cell,
    "group_center_whitened": _group_center_whitened_cell,
    "greedy_baseline": _greedy_baseline_cell,
    "length_weighted_center": _length_weighted_center_cell,
    "mean_normalize": of_rewards(successes.mean_normalize),
    "iqr_normalize": of_rewards(iqr_normalize),
    "otb": _otb_cell,
    "pass_at_k": of_rewards(successes.pass_at_k_advantage),
    "top_gap": of_rewards(successes.top_gap),
    "none": _none_cell,
    "teacher_gap": _teacher_gap_cell,
    "teacher_return": _teacher_return_cell,
    "teacher_prefix_gap": _teacher_prefix_gap_cell,
    "group_normalize_teacher": _group_normalize_teacher_cell,
}
