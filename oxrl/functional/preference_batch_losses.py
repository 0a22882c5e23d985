"""Preference losses that read a statistic of the global batch, or of the policy that sampled it.

The statistics come from `preference_statistics`, once per step, and are constants here. With u =
log p(chosen) - log p_reference(chosen), v the same of the rejected completion: margin = u - v, in
nats. How the losses are called: `preference_losses`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from oxrl.functional.preference_pairs import LossAndMetrics, OptionalTensor, read_pairs
from oxrl.tables.numbers import (
    ALPHA_DPO_ALPHA,
    ALPHA_DPO_BETA,
    ALPHA_DPO_GAMMA,
    AOT_BETA,
    BETA,
    ROBUSTNESS,
    WPO_BETA,
)


def aot(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    matched_ref_margins: Tensor,
    *,
    beta: float = AOT_BETA.default,
) -> LossAndMetrics:
    """Make the margins as a whole larger than the reference's: both are compared in sorted order.

        loss = -log sigmoid(beta * (log p(chosen) - log p(rejected) - r)), r the reference's gap

    Keep the nonzero `loss_weights` equal: sorting breaks the pairing, so the source forbids
    weights per pair.

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, or None: only metrics read them.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        matched_ref_margins: [N], the reference's gap of equal rank (`rank_match`).
        beta: scale of the log ratios, per nat; large keeps close to the reference.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2406.05882.
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
    gap = pairs.chosen - pairs.rejected
    ref_gap = pairs.constant(matched_ref_margins, "matched_ref_margins")
    margin = gap - ref_gap
    return pairs.logistic_loss(margin, beta)


def aot_unpaired(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    matched_rejected: Tensor,
    matched_chosen: Tensor,
    *,
    beta: float = AOT_BETA.default,
) -> LossAndMetrics:
    """Make the chosen log ratios as a whole larger than the rejected ones, in sorted order.

        loss = -log sigmoid(beta * (sort(u) - sort(v)))

    Keep the nonzero `loss_weights` equal, as for `aot`.

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        matched_rejected: [N], for each u the v of equal rank (`rank_match`).
        matched_chosen: [N], for each v the u of equal rank.
        beta: scale of the log ratios, per nat; large keeps close to the reference.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2406.05882.
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
    rejected = pairs.constant(matched_rejected, "matched_rejected")
    chosen = pairs.constant(matched_chosen, "matched_chosen")
    # The two of a sorted pair may be in different micro-batches: the value counts where u is, v
    # adds its gradient only.
    mirrored = -logsigmoid(beta * (chosen - pairs.rejected_log_ratio))
    own = -logsigmoid(beta * (pairs.chosen_log_ratio - rejected))
    return pairs.loss_and_metrics(own + mirrored - mirrored.detach(), beta)


def beta_dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    batch_beta: Tensor,
) -> LossAndMetrics:
    """DPO with a beta that the batch's own margins decide.

        loss = -log sigmoid(batch_beta * margin)

    Pairs that `beta_dpo_selection` drops have weight 0.

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        batch_beta: scalar, from `beta_dpo_beta`.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2407.08639.
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
    beta = pairs.constant(batch_beta, "batch_beta")
    losses = -logsigmoid(beta * pairs.margin)
    return pairs.loss_and_metrics(losses)


def dr_dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    log_mean: Tensor,
    *,
    beta: float = BETA.default,
    robustness: float = ROBUSTNESS.default,
) -> LossAndMetrics:
    """DPO against the worst reweighting of the pairs nearby, for labels that may be wrong.

        loss = -b log mean exp(-l / b) of the global batch's DPO losses l, b = robustness

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        log_mean: scalar, log mean exp(-l / b), from `dr_dpo_log_mean`.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        robustness: b; infinity is DPO.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2407.07880.
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
    # Each pair enters with its exact gradient coefficient; with weights 1/N the value is the
    # formula's too.
    level = pairs.constant(log_mean, "log_mean")
    own = -logsigmoid(beta * pairs.margin)
    coefficients = (-own.detach() / robustness - level).exp()
    losses = coefficients * (own - own.detach()) - robustness * level
    return pairs.loss_and_metrics(losses, beta)


def wpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    pair_weights: Tensor,
    *,
    beta: float = WPO_BETA.default,
) -> LossAndMetrics:
    """DPO with pairs weighted by how likely the policy is to have sampled them itself.

        loss = -weight * log sigmoid(beta * margin)

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        pair_weights: [N], the product of the two `wpo_weights` of a pair.
        beta: scale of the log ratios, per nat; large keeps close to the reference.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2406.11827, Eq. 2.
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
    weights = pairs.constant(pair_weights, "pair_weights")
    losses = -weights * logsigmoid(beta * pairs.margin)
    return pairs.loss_and_metrics(losses, beta)


def alpha_dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    standardized_gaps: Tensor,
    *,
    beta: float = ALPHA_DPO_BETA.default,
    gamma: float = ALPHA_DPO_GAMMA.default,
    alpha: float = ALPHA_DPO_ALPHA.default,
) -> LossAndMetrics:
    """SimPO with a target margin that follows how far the pair is ahead of the reference.

        loss = -log sigmoid(beta * (mean log p(chosen) - mean log p(rejected) - gamma - alpha * z))

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, or None: only metrics read them.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        standardized_gaps: [N], z, the standardized margin per token (`standardize`).
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        gamma: target margin, nats per token.
        alpha: weight of z.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2410.10148.
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
    gaps = pairs.constant(standardized_gaps, "standardized_gaps")
    margin = pairs.mean_chosen - pairs.mean_rejected - gamma - alpha * gaps
    return pairs.logistic_loss(margin, beta)
