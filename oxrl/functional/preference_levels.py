"""Preference losses on each log ratio by itself: its absolute level, or a function of it.

With u = log p(chosen) - log p_reference(chosen), v the same of the rejected completion: margin =
u - v, in nats. How the losses are called: `preference_losses`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from oxrl.functional.preference_pairs import (
    LossAndMetrics,
    OptionalTensor,
    Pairs,
    bounded_exp,
    read_pairs,
)
from oxrl.tables.numbers import (
    ALPHA,
    BCO_BETA,
    BETA,
    CAL_DPO_BETA,
    CALIBRATION_COEFF,
    H_DPO_ALPHA,
    NCA_BETA,
    SPPO_BETA,
)


def nca(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = NCA_BETA.default,
) -> LossAndMetrics:
    """Raise the chosen completion's log ratio, and keep both from growing without end.

        loss = -log sigmoid(beta u) - log sigmoid(-beta u) / 2 - log sigmoid(-beta v) / 2

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

    Source: arXiv:2402.05369, pair form.
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
    raised = -logsigmoid(beta * pairs.chosen_log_ratio)
    held = 0.5 * logsigmoid(-beta * pairs.chosen_log_ratio)
    lowered = 0.5 * logsigmoid(-beta * pairs.rejected_log_ratio)
    return pairs.loss_and_metrics(raised - held - lowered, beta)


def bco(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    reward_shift: Tensor,
    *,
    beta: float = BCO_BETA.default,
) -> LossAndMetrics:
    """Classify chosen and rejected completions by their rewards, around the mean reward so far.

        loss = -log sigmoid(beta u - d) - log sigmoid(-(beta v - d)), d = reward_shift

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        reward_shift: scalar, from `bco_reward_shift` (TRL: 0).
        beta: scale of the log ratios, per nat; large keeps close to the reference.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2404.04656.
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
    shift = pairs.constant(reward_shift, "reward_shift")
    chosen = logsigmoid(beta * pairs.chosen_log_ratio - shift)
    rejected = logsigmoid(-(beta * pairs.rejected_log_ratio - shift))
    return pairs.loss_and_metrics(-chosen - rejected, beta)


def _squared_levels(pairs: Pairs, beta: float) -> Tensor:
    """Squared distance [N] of u from 1 / (2 beta), and of v from -1 / (2 beta)."""
    chosen = (pairs.chosen_log_ratio - 0.5 / beta).square()
    rejected = (pairs.rejected_log_ratio + 0.5 / beta).square()
    return chosen + rejected


def sppo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = SPPO_BETA.default,
) -> LossAndMetrics:
    """Pull both log ratios to fixed targets, as if the chosen completion won every time.

        loss = (u - 1 / (2 beta))**2 + (v + 1 / (2 beta))**2

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: half the inverse of the targets, per nat.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2405.00675, Eq. 4.7, with win probabilities 1 and 0.
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
    return pairs.loss_and_metrics(_squared_levels(pairs, beta), beta)


def apo_zero(
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
    """Raise the chosen and lower the rejected, for chosen completions better than the model's.

        loss = 1 - sigmoid(beta u) + sigmoid(beta v)

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

    Source: arXiv:2408.06266, Eq. 7.
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
    chosen = (-beta * pairs.chosen_log_ratio).sigmoid()
    rejected = (beta * pairs.rejected_log_ratio).sigmoid()
    return pairs.loss_and_metrics(chosen + rejected, beta)


def apo_down(
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
    """Lower both, the rejected one more, for chosen completions worse than the model's.

        loss = sigmoid(beta u) + 1 - sigmoid(beta * margin)

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

    Source: arXiv:2408.06266, Eq. 8.
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
    chosen = (beta * pairs.chosen_log_ratio).sigmoid()
    order = (-beta * pairs.margin).sigmoid()
    return pairs.loss_and_metrics(chosen + order, beta)


def cal_dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = CAL_DPO_BETA.default,
    calibration_coeff: float = CALIBRATION_COEFF.default,
) -> LossAndMetrics:
    """DPO at beta 1, with both log ratios pulled to the targets of `sppo`.

        loss = -log sigmoid(margin) + c ((u - 1 / (2 beta))**2 + (v + 1 / (2 beta))**2)

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: half the inverse of the targets, per nat.
        calibration_coeff: c, weight of the targets.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2412.14516.
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
    order = -logsigmoid(pairs.margin)
    losses = order + calibration_coeff * _squared_levels(pairs, beta)
    return pairs.loss_and_metrics(losses, beta)


def f_dpo_forward_kl(
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
    """DPO whose distance from the reference is the forward KL.

        loss = -log sigmoid(beta * (exp(-v) - exp(-u)))

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

    Source: f-DPO, arXiv:2309.16240; its reverse KL is `dpo`.
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
    rejected = bounded_exp(-pairs.rejected_log_ratio)
    chosen = bounded_exp(-pairs.chosen_log_ratio)
    margin = rejected - chosen
    return pairs.logistic_loss(margin, beta)


def f_dpo_jensen_shannon(
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
    """DPO whose distance from the reference is the Jensen-Shannon divergence.

        loss = -log sigmoid(beta * (log sigmoid(u) - log sigmoid(v)))

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

    Source: f-DPO, arXiv:2309.16240.
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
    chosen = logsigmoid(pairs.chosen_log_ratio)
    rejected = logsigmoid(pairs.rejected_log_ratio)
    margin = chosen - rejected
    return pairs.logistic_loss(margin, beta)


def f_dpo_alpha(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    alpha: float = ALPHA.default,
) -> LossAndMetrics:
    """DPO whose distance from the reference is the alpha divergence.

        loss = -log sigmoid(beta * (exp((alpha - 1) u) - exp((alpha - 1) v)) / (alpha - 1))

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        alpha: order of the divergence, not 1; the paper counts 1 - alpha.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.
        ValueError: alpha is 1, where the divergence has no such form.

    Source: f-DPO, arXiv:2309.16240.
    """
    if alpha == 1:
        raise ValueError(
            "alpha=1 is the limit in which the alpha divergence is the reverse KL; use dpo"
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
    power = alpha - 1
    chosen = bounded_exp(power * pairs.chosen_log_ratio)
    rejected = bounded_exp(power * pairs.rejected_log_ratio)
    losses = -logsigmoid(beta * (chosen - rejected) / power)
    return pairs.loss_and_metrics(losses, beta)


def chi_po(
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
    """DPO with a chi-squared term, which punishes log ratios that grow far.

        loss = -log sigmoid(beta * (u + exp(u) - v - exp(v))), exponents at most 20

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

    Source: arXiv:2407.13399.
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
    chosen = pairs.chosen_log_ratio.clamp(max=20).exp()
    rejected = pairs.rejected_log_ratio.clamp(max=20).exp()
    margin = pairs.margin + chosen - rejected
    return pairs.logistic_loss(margin, beta)


def h_dpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    alpha: float = H_DPO_ALPHA.default,
) -> LossAndMetrics:
    """DPO that prefers policies of lower entropy: sharper than the reference where alpha < 1.

        loss = -log sigmoid(beta * (margin + (alpha - 1) (log p(chosen) - log p(rejected))))

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, the same of the frozen reference.
        chosen_lengths, rejected_lengths: [N] trained tokens, or None: only metrics read them.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the log ratios, per nat; large keeps close to the reference.
        alpha: weight of the policy's own gap; 1 is DPO.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2411.07595.
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
    sharpening = (alpha - 1) * (pairs.chosen - pairs.rejected)
    margin = pairs.margin + sharpening
    return pairs.logistic_loss(margin, beta)
