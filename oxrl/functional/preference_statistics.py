"""What a preference loss needs from outside its pair: statistics of the global batch, and sums over chosen tokens.

The statistics take the whole global batch at once (every rank's pairs), are detached and carry no state: running means
go in and come out. Slice a per-pair result to the micro-batch; pass a scalar as it is. They describe the policy at the
start of the step, so they cost one forward without gradient, unless the batch is a single micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.masks import at_least_float32, fill_masked


def sequence_logprobs(logprobs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of log-probabilities and number of trained tokens per row: what every preference loss reads.

    Args:
        logprobs: [B, T] nats, token-aligned.
        response_mask: [B, T] bool.

    Returns:
        [B] nats in at least float32, [B] int64.
    """
    return fill_masked(logprobs, response_mask).sum(1), response_mask.sum(1)


def length_desensitized_logprobs(
    logprobs: Tensor, response_mask: Tensor, shared_lengths: Tensor, *, tail_coeff: float
) -> Tensor:
    """LD-DPO's sums: trained tokens after the first `shared_lengths` of a row count `tail_coeff` times.

    Source: arXiv:2409.06411. For policy and reference alike; then any loss. tail_coeff 1 is the plain sum.

    Args:
        logprobs: [B, T] nats. response_mask: [B, T] bool.
        shared_lengths: [B] int64, the smaller of the two lengths of the row's pair.
        tail_coeff: in [0, 1].

    Returns:
        [B] nats.
    """
    position = response_mask.cumsum(1)
    filled = fill_masked(logprobs, response_mask)
    return torch.where(position <= shared_lengths[:, None], filled, tail_coeff * filled).sum(1)


def subsampled_mask(response_mask: Tensor, noise: Tensor, counts: Tensor) -> Tensor:
    """SamPO's mask: `counts` trained tokens per row, those with the least `noise`.

    Source: arXiv:2406.10957, with counts = the smaller of the pair's two lengths. Use the same mask for the reference.

    Args:
        response_mask: [B, T] bool.
        noise: [B, T] independent uniforms, drawn by the caller from a seed.
        counts: [B] int64, at most the trained tokens of the row.

    Returns:
        [B, T] bool, for `sequence_logprobs`.
    """
    rank = noise.masked_fill(~response_mask, torch.inf).argsort(1).argsort(1)
    return response_mask & (rank < counts[:, None])


@torch.no_grad()
def wpo_weights(logprobs: Tensor, sum_p_squared: Tensor, response_mask: Tensor) -> Tensor:
    """WPO's weight of a completion, exp(mean_t(logprobs - log sum_v p_v**2)): how on-policy it is.

    Source: arXiv:2406.11827, Eq. 2 and its per-step normalization by sum_v p_v**2.

    Args:
        logprobs: [B, T] nats. sum_p_squared: [B, T], sum over the vocabulary. response_mask: [B, T] bool.

    Returns:
        [B], positive, detached.
    """
    relative = fill_masked(logprobs, response_mask) - fill_masked(sum_p_squared, response_mask, 1.0).log()
    return (relative.sum(1) / response_mask.sum(1).clamp(min=1)).exp()


@torch.no_grad()
def rank_match(values: Tensor, others: Tensor) -> Tensor:
    """For each of `values` [N], the one of `others` [N] of equal rank. Equal values keep their order.

    For `aot`: rank_match(chosen - rejected, ref_chosen - ref_rejected). For `aot_unpaired`: rank_match(u, v) and
    rank_match(v, u).
    """
    return others.sort().values[values.sort(stable=True).indices.argsort()]


@torch.no_grad()
def kto_baseline(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """z of KTO: max(0, mean log ratio) over completions [B] shown after a prompt they do not answer, scalar, nats.

    Source: arXiv:2402.01306; mismatch by shifting the completions by one within the batch (two or more).
    """
    return (at_least_float32(logprobs) - at_least_float32(ref_logprobs)).mean().clamp(min=0)


@torch.no_grad()
def bco_reward_shift(rewards: Tensor, *, mean: float, count: int) -> tuple[Tensor, int]:
    """BCO's d: the mean (scalar) of all rewards beta * log ratio so far, and their new number.

    Source: arXiv:2404.04656. `rewards` are the batch's, chosen and rejected, any shape; start from mean 0, count 0.
    """
    total = count + rewards.numel()
    return (at_least_float32(rewards).sum() + mean * count) / total, total


@torch.no_grad()
def dr_dpo_log_mean(pair_losses: Tensor, loss_weights: Tensor, *, robustness: float = 1.0) -> Tensor:
    """log mean exp(-l / b) (scalar) over the global batch's DPO losses [N], b = `robustness`. arXiv:2407.07880.

    Weights 1/N give the plain mean; a pair of weight 0 does not count.
    """
    shares = (loss_weights / loss_weights.sum()).to(pair_losses.dtype)
    terms = torch.where(loss_weights != 0, shares.log() - pair_losses / robustness, -torch.inf)
    return terms.logsumexp(0)


@torch.no_grad()
def beta_dpo_selection(margins: Tensor, noise: Tensor, *, mean: float, std: float, drop: float = 0.2) -> Tensor:
    """Which pairs beta-DPO keeps: 1 - drop of them, drawn without replacement, p ~ exp(-((margin - mean)/std)**2 / 2).

    Source: arXiv:2407.08639. The draw is Gumbel top-k on the caller's uniforms, so it is a function of its
    arguments.

    Args:
        margins: [N] nats, u - v. noise: [N] uniforms in (0, 1).
        mean, std: running moments of the margins (decay 0.9 in the source). drop: in [0, 1).

    Returns:
        [N] bool; at least one pair is kept.
    """
    log_odds = -0.5 * ((at_least_float32(margins) - mean) / max(std, 1e-6)).square()
    gumbel = -(-noise.to(log_odds.dtype).log()).log()
    kept = torch.zeros_like(margins, dtype=torch.bool)
    kept[(log_odds + gumbel).topk(max(1, round((1 - drop) * len(margins)))).indices] = True
    return kept


@torch.no_grad()
def beta_dpo_beta(margins: Tensor, *, mean: float, beta: float = 0.1, scale: float = 0.6) -> Tensor:
    """beta-DPO's beta (scalar): beta (1 + scale (mean(margins) - mean)), at least 1e-3, over the kept pairs' margins.

    Source: arXiv:2407.08639. One beta per batch, detached, as in the authors' code.
    """
    return (beta * (1 + scale * (at_least_float32(margins).mean() - mean))).clamp(min=1e-3)


@torch.no_grad()
def standardize(values: Tensor, *, mean: float, std: float) -> Tensor:
    """(values - mean) / std, detached, [N]: alpha-DPO's z from running moments (decay 0.9). arXiv:2410.10148."""
    return (at_least_float32(values) - mean) / max(std, 1e-6)
