"""DPO with its margin changed per pair, or an anchor added, against likelihood displacement.

With u = log p(chosen) - log p_reference(chosen), v the same of the rejected completion: margin =
u - v, in nats. How the losses are called: `preference_losses`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from oxrl.functional.preference_pairs import LossAndMetrics, OptionalTensor, read_pairs
from oxrl.tables.numbers import (
    BALANCE,
    BETA,
    LENGTH_COEFF,
    MASS_COEFF,
    PENALTY_COEFF,
    REJECTED_SCALE,
    RPO_BETA,
    RPO_NLL_COEFF,
)


def odpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    offsets: Tensor,
    *,
    beta: float = BETA.default,
) -> LossAndMetrics:
    """DPO in which a pair has to win by as much as its scores are apart.

        loss = -log sigmoid(beta * margin - offset)

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        offsets: [N], from the gap between the scores of the two completions; a data column.
        beta: scale of the log ratios, per nat; large keeps close to the reference.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2402.10571.
    """
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    losses = -logsigmoid(beta * pairs.margin - pairs.constant(offsets, "offsets"))
    return pairs.loss_and_metrics(losses, beta)


def r_dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    length_coeff: float = LENGTH_COEFF.default,
) -> LossAndMetrics:
    """DPO on a reward with a price per token: the length that won a pair is explained by the price.

        loss = -log sigmoid(beta * margin + length_coeff * (n_w - n_l)), n the trained tokens

    The policy that maximizes E[r - length_coeff n] - beta KL has r = beta * log ratio +
    length_coeff * n, up to a constant of the prompt: a chosen completion that is longer needs a
    smaller margin to explain its victory, and a shorter one a larger.

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        length_coeff: price of a token in the reward.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2403.19159, section 3.
    """
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    price = length_coeff * (pairs.chosen_length - pairs.rejected_length)
    losses = -logsigmoid(beta * pairs.margin + price)
    return pairs.loss_and_metrics(losses, beta)


def dpop(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    penalty_coeff: float = PENALTY_COEFF.default,
) -> LossAndMetrics:
    """DPO that keeps the chosen completion at least as likely as under the reference.

        loss = -log sigmoid(beta * (margin - penalty_coeff * max(0, -u)))

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        penalty_coeff: weight of each nat below the reference.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2402.13228.
    """
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    penalty = penalty_coeff * (-pairs.chosen_log_ratio).relu()
    margin = pairs.margin - penalty
    return pairs.logistic_loss(margin, beta)


def dpo_shift(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    rejected_scale: float = REJECTED_SCALE.default,
) -> LossAndMetrics:
    """DPO in which the rejected completion counts less, so that the chosen one falls less.

        loss = -log sigmoid(beta * (u - rejected_scale * v))

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        rejected_scale: in (0, 1], fixed or scheduled by the caller; 1 is DPO.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2502.07599.
    """
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    margin = pairs.chosen_log_ratio - rejected_scale * pairs.rejected_log_ratio
    return pairs.logistic_loss(margin, beta)


def bpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    balance: float = BALANCE.default,
) -> LossAndMetrics:
    """DPO on the smaller of the two gains, so that neither side does all the work.

        loss = -log sigmoid(beta * min(u, -balance * v))

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        balance: weight of the rejected completion's fall.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2506.03557.
    """
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    gain = torch.minimum(pairs.chosen_log_ratio, -balance * pairs.rejected_log_ratio)
    return pairs.logistic_loss(gain, beta)


def minor_dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
) -> LossAndMetrics:
    """DPO that stops pushing the rejected completion below the reference.

        loss = -log sigmoid(beta * (u - max(0, v)))

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2408.09834.
    """
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    margin = pairs.chosen_log_ratio - pairs.rejected_log_ratio.relu()
    return pairs.logistic_loss(margin, beta)


def c2_dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    mass_coeff: float = MASS_COEFF.default,
) -> LossAndMetrics:
    """DPO in which probability moves between the two completions, not away from both.

        loss = -log sigmoid(beta * margin) + mass_coeff * (u + v)**2

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        mass_coeff: weight of the mass that leaves the pair.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2502.17507; the default of mass_coeff is ours.
    """
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    order = -logsigmoid(beta * pairs.margin)
    moved = (pairs.chosen_log_ratio + pairs.rejected_log_ratio).square()
    return pairs.loss_and_metrics(order + mass_coeff * moved, beta)


def rpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = RPO_BETA.default,
    nll_coeff: float = RPO_NLL_COEFF.default,
) -> LossAndMetrics:
    """DPO plus the chosen completion's negative log-likelihood per token.

        loss = -log sigmoid(beta * margin) - nll_coeff * log p(chosen) / n_w

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        nll_coeff: weight of the likelihood.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: RPO, arXiv:2405.16436 (0.005); IRPO, arXiv:2404.19733 (1).
    """
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    losses = -logsigmoid(beta * pairs.margin) - nll_coeff * pairs.mean_chosen
    return pairs.loss_and_metrics(losses, beta)
