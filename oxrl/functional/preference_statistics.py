"""What a preference loss needs from outside its pair: statistics of the global batch, and sums over
chosen tokens.

The statistics take the whole global batch at once (every rank's pairs), are detached and carry no
state: running means go in and come out. Slice a per-pair result to the micro-batch; pass a scalar
as it is. They describe the policy at the start of the step, so they cost one forward without
gradient, unless the batch is a single micro-batch.

Shapes: `logprobs` [B, T] nats, token-aligned; `response_mask` [B, T] bool, the trained tokens;
per-pair tensors [N]; `noise` independent uniforms in (0, 1), drawn by the caller from a seed;
`mean` and `std` running moments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.masks import at_least_float32, fill_masked


def sequence_logprobs(logprobs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of log-probabilities [B] and number of trained tokens [B] per row: what every loss
    reads.
    """
    return fill_masked(logprobs, response_mask).sum(1), response_mask.sum(1)


def length_desensitized_logprobs(
    logprobs: Tensor, response_mask: Tensor, shared_lengths: Tensor, *, tail_coeff: float
) -> Tensor:
    """LD-DPO's sums [B]: trained tokens after the first `shared_lengths` count `tail_coeff` times.
    arXiv:2409.06411.

    `shared_lengths` [B] is the smaller length of the row's pair; tail_coeff in [0, 1], 1 is the
    plain sum. For policy and reference alike.
    """
    position = response_mask.cumsum(1)
    filled = fill_masked(logprobs, response_mask)
    return torch.where(position <= shared_lengths[:, None], filled, tail_coeff * filled).sum(1)


@torch.no_grad()
def wpo_weights(logprobs: Tensor, sum_p_squared: Tensor, response_mask: Tensor) -> Tensor:
    """WPO's weight [B], how on-policy a row is: exp(mean_t(logprobs - log sum_v p_v**2)).
    arXiv:2406.11827, Eq. 2.

    `sum_p_squared` [B, T] is summed over the vocabulary: the source's per-step normalization.
    """
    relative = (
        fill_masked(logprobs, response_mask) - fill_masked(sum_p_squared, response_mask, 1.0).log()
    )
    return (relative.sum(1) / response_mask.sum(1).clamp(min=1)).exp()


@torch.no_grad()
def rank_match(values: Tensor, others: Tensor) -> Tensor:
    """For each of `values` [N], the one of `others` [N] of equal rank. Equal values keep their
    order.

    aot: rank_match(chosen - rejected, ref_chosen - ref_rejected). aot_unpaired: rank_match(u, v),
    rank_match(v, u).
    """
    return others.sort().values[values.sort(stable=True).indices.argsort()]


@torch.no_grad()
def kto_baseline(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """z of KTO, scalar nats: max(0, mean log ratio) of completions [B] after prompts not theirs.
    arXiv:2402.01306.

    The mismatch is made by shifting the completions by one within the batch (two or more).
    """
    return (at_least_float32(logprobs) - at_least_float32(ref_logprobs)).mean().clamp(min=0)


@torch.no_grad()
def bco_reward_shift(rewards: Tensor, *, mean: float, count: int) -> tuple[Tensor, int]:
    """BCO's d: the mean (scalar) of all rewards beta * log ratio so far, and their new number.
    arXiv:2404.04656.

    `rewards` are the batch's, chosen and rejected, any shape; start from mean 0, count 0.
    """
    total = count + rewards.numel()
    return (at_least_float32(rewards).sum() + mean * count) / total, total


@torch.no_grad()
def dr_dpo_log_mean(
    pair_losses: Tensor, loss_weights: Tensor, *, robustness: float = 1.0
) -> Tensor:
    """log mean exp(-l / b) (scalar) of DPO losses l [N], b = `robustness`; weight 0: left out.
    arXiv:2407.07880.
    """
    shares = (loss_weights / loss_weights.sum()).to(pair_losses.dtype)
    terms = torch.where(loss_weights != 0, shares.log() - pair_losses / robustness, -torch.inf)
    return terms.logsumexp(0)


@torch.no_grad()
def beta_dpo_selection(
    margins: Tensor, noise: Tensor, *, mean: float, std: float, drop: float = 0.2
) -> Tensor:
    """Which pairs beta-DPO keeps [N] (at least one): 1 - drop of them, drawn without replacement.
    arXiv:2407.08639.

    p ~ exp(-((margin - mean)/std)**2 / 2), moments with decay 0.9 in the source, margins u - v in
    nats. The draw is Gumbel top-k on the noise [N], so it is a function of the arguments.
    """
    log_odds = -0.5 * ((at_least_float32(margins) - mean) / max(std, 1e-6)).square()
    gumbel = -(-noise.to(log_odds.dtype).log()).log()
    kept = torch.zeros_like(margins, dtype=torch.bool)
    kept[(log_odds + gumbel).topk(max(1, round((1 - drop) * len(margins)))).indices] = True
    return kept


@torch.no_grad()
def beta_dpo_beta(margins: Tensor, *, mean: float, beta: float = 0.1, scale: float = 0.6) -> Tensor:
    """beta-DPO's beta (scalar): beta (1 + scale (mean(kept margins) - mean)), at least 1e-3.
    arXiv:2407.08639.
    """
    return (beta * (1 + scale * (at_least_float32(margins).mean() - mean))).clamp(min=1e-3)


@torch.no_grad()
def standardize(values: Tensor, *, mean: float, std: float) -> Tensor:
    """(values - mean) / std, detached, [N]: alpha-DPO's z from running moments (decay 0.9).
    arXiv:2410.10148.
    """
    return (at_least_float32(values) - mean) / max(std, 1e-6)
