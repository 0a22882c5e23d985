"""Statistics of the global batch, and sums over chosen tokens, that preference losses need besides
their pairs.

The statistics take the whole global batch at once (every rank's pairs), are detached and carry no
state: running means go in and come out. Slice a per-pair result to the micro-batch; pass a scalar
as it is. They describe the policy at the start of the step, so they cost one forward without
gradient, unless the batch is a single micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.masks import at_least_float32, fill_masked
from oxrl.tables.numbers import BETA, BETA_SCALE, DROP_FRAC, ROBUSTNESS


def sequence_logprobs(logprobs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the log-probabilities of each completion: what every loss of pairs reads.

    Args:
        logprobs: [B, T] nats, token-aligned.
        response_mask: [B, T] bool, the trained tokens.

    Returns:
        Sums [B] in nats, and trained tokens [B].
    """
    return fill_masked(logprobs, response_mask).sum(1), response_mask.sum(1)


def length_desensitized_logprobs(
    logprobs: Tensor, response_mask: Tensor, shared_lengths: Tensor, *, tail_coeff: float
) -> Tensor:
    """Sum log-probabilities with less weight behind the length that both completions have.

    For policy and reference alike.

    Args:
        logprobs: [B, T] nats, token-aligned.
        response_mask: [B, T] bool, the trained tokens.
        shared_lengths: [B], the smaller length of the row's pair.
        tail_coeff: what later trained tokens count, in [0, 1]; 1 is the plain sum.

    Returns:
        Sums [B] in nats.

    Source: LD-DPO, arXiv:2409.06411.
    """
    position = response_mask.cumsum(1)
    filled = fill_masked(logprobs, response_mask)
    return torch.where(position <= shared_lengths[:, None], filled, tail_coeff * filled).sum(1)


@torch.no_grad()
def wpo_weights(logprobs: Tensor, sum_p_squared: Tensor, response_mask: Tensor) -> Tensor:
    """Say how likely the policy is to have sampled each completion itself.

        weight = exp(mean_t(logprobs - log sum_v p_v**2))

    Args:
        logprobs: [B, T] nats, token-aligned.
        sum_p_squared: [B, T], summed over the vocabulary: the source's per-step normalization.
        response_mask: [B, T] bool, the trained tokens.

    Returns:
        Weights [B].

    Source: WPO, arXiv:2406.11827, Eq. 2.
    """
    expected = fill_masked(sum_p_squared, response_mask, 1.0).log()
    relative = fill_masked(logprobs, response_mask) - expected
    return (relative.sum(1) / response_mask.sum(1).clamp(min=1)).exp()


@torch.no_grad()
def rank_match(values: Tensor, others: Tensor) -> Tensor:
    """Pick for each value the other one of equal rank. Equal values keep their order.

    aot: rank_match(chosen - rejected, ref_chosen - ref_rejected). aot_unpaired: rank_match(u, v),
    rank_match(v, u).

    Args:
        values, others: [N].

    Returns:
        `others` in the order of `values`, [N].
    """
    return others.sort().values[values.sort(stable=True).indices.argsort()]


@torch.no_grad()
def kto_baseline(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate how far the policy is from the reference: KTO's z = max(0, mean log ratio).

    Args:
        logprobs, ref_logprobs: [B] nats, sums of completions after prompts that are not theirs. The
            mismatch is made by shifting the completions by one within the batch (two or more).

    Returns:
        Scalar, nats.

    Source: arXiv:2402.01306.
    """
    return (at_least_float32(logprobs) - at_least_float32(ref_logprobs)).mean().clamp(min=0)


@torch.no_grad()
def bco_reward_shift(rewards: Tensor, *, mean: float, count: int) -> tuple[Tensor, int]:
    """Average all rewards beta * log ratio so far: BCO's d.

    Args:
        rewards: the batch's, chosen and rejected, any shape.
        mean, count: of the rewards before; start from 0 and 0.

    Returns:
        The mean (scalar), and the new count.

    Source: arXiv:2404.04656.
    """
    total = count + rewards.numel()
    return (at_least_float32(rewards).sum() + mean * count) / total, total


@torch.no_grad()
def dr_dpo_log_mean(
    pair_losses: Tensor, loss_weights: Tensor, *, robustness: float = ROBUSTNESS.default
) -> Tensor:
    """Log of the mean of exp(-l / b) over the global batch, which normalizes Dr. DPO's weights.

    Args:
        pair_losses: [N], DPO losses l.
        loss_weights: [N], 0 for a pair to leave out.
        robustness: b.

    Returns:
        Scalar.

    Source: arXiv:2407.07880.
    """
    shares = (loss_weights / loss_weights.sum()).to(pair_losses.dtype)
    weighted = shares.log() - pair_losses / robustness
    terms = torch.where(loss_weights != 0, weighted, -torch.inf)
    return terms.logsumexp(0)


@torch.no_grad()
def beta_dpo_selection(
    margins: Tensor, noise: Tensor, *, mean: float, std: float, drop: float = DROP_FRAC.default
) -> Tensor:
    """Choose the pairs that beta-DPO keeps: typical margins more likely, without replacement.

        p ~ exp(-((margin - mean) / std)**2 / 2)

    The choice is Gumbel top-k on the noise, so it is a function of the arguments.

    Args:
        margins: [N], u - v in nats.
        noise: [N] independent uniforms in (0, 1), made by the caller from a seed.
        mean, std: running moments of the margins (decay 0.9 in the source).
        drop: share of the pairs to leave out; at least one is kept.

    Returns:
        [N] bool.

    Source: arXiv:2407.08639.
    """
    log_odds = -0.5 * ((at_least_float32(margins) - mean) / max(std, 1e-6)).square()
    gumbel = -(-noise.to(log_odds.dtype).log()).log()
    count = max(1, round((1 - drop) * len(margins)))
    kept = torch.zeros_like(margins, dtype=torch.bool)
    kept[(log_odds + gumbel).topk(count).indices] = True
    return kept


@torch.no_grad()
def beta_dpo_beta(
    margins: Tensor,
    *,
    mean: float,
    beta: float = BETA.default,
    scale: float = BETA_SCALE.default,
) -> Tensor:
    """Raise beta for a batch with large margins: beta (1 + scale (mean(margins) - mean)).

    Args:
        margins: [M] nats, those kept.
        mean: running mean of the margins.
        beta, scale: the beta of an average batch, and how it moves.

    Returns:
        Scalar, at least 1e-3.

    Source: beta-DPO, arXiv:2407.08639.
    """
    gain = at_least_float32(margins).mean() - mean
    return (beta * (1 + scale * gain)).clamp(min=1e-3)


@torch.no_grad()
def standardize(values: Tensor, *, mean: float, std: float) -> Tensor:
    """Subtract the running mean and divide by the running deviation: alpha-DPO's z.

    Args:
        values: [N].
        mean, std: running moments (decay 0.9).

    Returns:
        [N], detached.

    Source: arXiv:2410.10148.
    """
    return (at_least_float32(values) - mean) / max(std, 1e-6)
