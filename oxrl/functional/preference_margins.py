"""Preference losses of one number per pair: the margin between its two log ratios.

With u = log p(chosen) - log p_reference(chosen), v the same of the rejected completion: margin =
u - v, in nats, and x = beta * margin. How the losses are called: `preference_losses`.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from oxrl.functional.preference_pairs import LossAndMetrics, OptionalTensor, bounded_exp, read_pairs
from oxrl.tables.numbers import (
    BETA,
    DISCOPOP_BETA,
    EXO_LABEL_NOISE,
    FOCAL_PO_GAMMA,
    LABEL_NOISE,
    SIGMOID_NORM_BETA,
    TAU,
)


def dpo(
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
    """Make the chosen completion likelier than the rejected one, measured against the reference.

        loss = -log sigmoid(beta * margin)

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

    Source: arXiv:2305.18290, Eq. 7.
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
    return pairs.logistic_loss(pairs.margin, beta)


def cdpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    label_noise: float = LABEL_NOISE.default,
) -> LossAndMetrics:
    """DPO with smoothed labels: a share of the pairs is taken to be labeled the wrong way.

        loss = -(1 - label_noise) log sigmoid(x) - label_noise log sigmoid(-x)

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        label_noise: share of labels taken to be flipped.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: Mitchell's note on conservative DPO; DPO is arXiv:2305.18290.
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
    right = -(1 - label_noise) * logsigmoid(beta * pairs.margin)
    flipped = label_noise * logsigmoid(-beta * pairs.margin)
    return pairs.loss_and_metrics(right - flipped, beta)


def robust_dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    label_noise: float = LABEL_NOISE.default,
) -> LossAndMetrics:
    """DPO whose expectation is that of clean labels, though a known share is flipped.

        loss = (-(1 - e) log sigmoid(x) + e log sigmoid(-x)) / (1 - 2 e), e = label_noise

    It has no lower bound.

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        label_noise: share of labels taken to be flipped.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.
        ValueError: label_noise is not in [0, 0.5).

    Source: arXiv:2403.00409.
    """
    if not 0 <= label_noise < 0.5:
        raise ValueError(
            f"label_noise={label_noise} must be in [0, 0.5): at 0.5 labels say nothing; "
            "lower label_noise"
        )
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    x = beta * pairs.margin
    right = -(1 - label_noise) * logsigmoid(x)
    flipped = label_noise * logsigmoid(-x)
    losses = (right + flipped) / (1 - 2 * label_noise)
    return pairs.loss_and_metrics(losses, beta)


def ipo(
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
    """Pull the margin per token to a target, so that it cannot grow without end.

        loss = (u / n_w - v / n_l - 1 / (2 beta))**2, n the trained tokens

    Per token, as its authors run it (and TRL): on sums, the literal text, beta depends on the
    length (`ipo_sum`).

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: half the inverse of the target margin.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2310.12036, Eq. 17.
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
    losses = (pairs.mean_margin - 1 / (2 * beta)).square()
    return pairs.loss_and_metrics(losses, beta)


def ipo_sum(
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
    """Pull the margin to a target, with log-probabilities summed as in the paper's text.

        loss = (margin - 1 / (2 beta))**2

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: half the inverse of the target margin.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2310.12036, Eq. 17.
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
    losses = (pairs.margin - 1 / (2 * beta)).square()
    return pairs.loss_and_metrics(losses, beta)


def hinge(
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
    """Push the scaled margin up to 1 and no further.

        loss = max(0, 1 - x)

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

    Source: SLiC, arXiv:2305.10425, which has no reference; RSO, arXiv:2309.06657, draws its
    pairs by rejection sampling.
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
    losses = (1 - beta * pairs.margin).relu()
    return pairs.loss_and_metrics(losses, beta)


def sigmoid_norm(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = SIGMOID_NORM_BETA.default,
) -> LossAndMetrics:
    """DPO on log ratios per token, so that long completions do not weigh more.

        loss = -log sigmoid(beta * (u / n_w - v / n_l)), n the trained tokens

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: Tulu 3, arXiv:2411.15124.
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
    return pairs.logistic_loss(pairs.mean_margin, beta)


def exo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    label_noise: float = EXO_LABEL_NOISE.default,
) -> LossAndMetrics:
    """Reverse KL from the policy's preference for the chosen completion to the smoothed label.

        loss = q log(q / (1 - label_noise)) + (1 - q) log((1 - q) / label_noise), q = sigmoid(x)

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        label_noise: share of labels taken to be flipped.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.
        ValueError: label_noise is not in (0, 1).

    Source: arXiv:2402.00856, Eq. 16.
    """
    if not 0 < label_noise < 1:
        raise ValueError(
            f"label_noise={label_noise} must be in (0, 1): exo takes its logarithm; 0.001 is usual"
        )
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    x = beta * pairs.margin
    win = x.sigmoid() * (logsigmoid(x) - math.log1p(-label_noise))
    defeat = (-x).sigmoid() * (logsigmoid(-x) - math.log(label_noise))
    return pairs.loss_and_metrics(win + defeat, beta)


def discopop(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = DISCOPOP_BETA.default,
    tau: float = TAU.default,
) -> LossAndMetrics:
    """The loss that a language model found: logistic where a pair is wrong, else exponential.

        loss = (1 - s) (-log sigmoid(x)) + s exp(-x), s = sigmoid(x / tau) with its gradient

    It is not convex.

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        tau: width of the blend between the two, in units of x.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2406.08414, Eq. 5.
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
    x = beta * pairs.margin
    logistic = -(-x / tau).sigmoid() * logsigmoid(x)
    # s exp(-x) as exp(log s - x): finite where s * exp(-x) is 0 * inf.
    exponential = bounded_exp(logsigmoid(x / tau) - x)
    return pairs.loss_and_metrics(logistic + exponential, beta)


def gpo_exponential(
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
    """Exponential loss of the margin.

        loss = exp(-x)

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

    Source: GPO, arXiv:2402.05749; its logistic member is `dpo`, its hinge `hinge`.
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
    losses = bounded_exp(-beta * pairs.margin)
    return pairs.loss_and_metrics(losses, beta)


def gpo_squared_hinge(
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
    """Squared hinge of the margin.

        loss = max(0, 1 - x)**2

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

    Source: GPO, arXiv:2402.05749.
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
    losses = (1 - beta * pairs.margin).relu().square()
    return pairs.loss_and_metrics(losses, beta)


def gpo_savage(
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
    """Bounded loss of the margin, which gives up on pairs that are far wrong.

        loss = sigmoid(-x)**2

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

    Source: GPO, arXiv:2402.05749.
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
    losses = (-beta * pairs.margin).sigmoid().square()
    return pairs.loss_and_metrics(losses, beta)


def focal_po(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    gamma: float = FOCAL_PO_GAMMA.default,
) -> LossAndMetrics:
    """DPO with less weight on the pairs that the policy cannot order yet.

        loss = -stop_gradient(sigmoid(x)**gamma) log sigmoid(x)

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        gamma: exponent of the weight; 0 is DPO.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2501.06645.
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
    log_win = logsigmoid(beta * pairs.margin)
    weight = (gamma * log_win).exp().detach()
    return pairs.loss_and_metrics(-weight * log_win, beta)
