"""Preference losses without a reference model.

m_w and m_l are the mean log-probabilities per trained token of the chosen and the rejected
completion, n_w and n_l their lengths. How the losses are called: `preference_losses`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from oxrl.functional.preference_pairs import (
    LossAndMetrics,
    OptionalTensor,
    bounded_exp,
    log1mexp,
    read_pairs,
)
from oxrl.tables.numbers import (
    ALPHA_PO_ALPHA,
    ALPHA_PO_BETA,
    BETA,
    MARGIN_GAMMA,
    NLL_COEFF,
    ODDS_COEFF,
    POWER_BETA,
    POWER_NLL_COEFF,
    SIMPO_BETA,
    SIMPO_GAMMA,
)


def simpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = SIMPO_BETA.default,
    gamma: float = SIMPO_GAMMA.default,
) -> LossAndMetrics:
    """Make the chosen completion likelier per token than the rejected one, by a target margin.

        loss = -log sigmoid(beta * (m_w - m_l) - gamma)

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, or None: only metrics read them.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the margin.
        gamma: target of the scaled margin.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2405.14734; gamma / beta is 0.3 to 0.55 there.
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
    losses = -logsigmoid(beta * (pairs.mean_chosen - pairs.mean_rejected) - gamma)
    return pairs.loss_and_metrics(losses, beta)


def alpha_po(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = ALPHA_PO_BETA.default,
    gamma: float = MARGIN_GAMMA.default,
    alpha: float = ALPHA_PO_ALPHA.default,
) -> LossAndMetrics:
    """SimPO on a reward between the log-probability and the probability.

        loss = -log sigmoid(beta * (r_w - r_l) - gamma), r = (1 - exp(m)**-alpha) / alpha

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, or None: only metrics read them.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the margin.
        gamma: target of the scaled margin.
        alpha: shape of the reward, not 0.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.
        ValueError: alpha is 0, where the reward has no such form.

    Source: arXiv:2501.03884; alpha to 0 is SimPO.
    """
    if alpha == 0:
        raise ValueError("alpha=0 is the limit in which AlphaPO is SimPO; use simpo")
    pairs = read_pairs(
        chosen_logprobs,
        rejected_logprobs,
        ref_chosen_logprobs,
        ref_rejected_logprobs,
        chosen_lengths,
        rejected_lengths,
        loss_weights,
    )
    rejected = bounded_exp(-alpha * pairs.mean_rejected)
    chosen = bounded_exp(-alpha * pairs.mean_chosen)
    losses = -logsigmoid(beta * (rejected - chosen) / alpha - gamma)
    return pairs.loss_and_metrics(losses, beta)


def cpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = BETA.default,
    nll_coeff: float = NLL_COEFF.default,
) -> LossAndMetrics:
    """Make the chosen completion likelier than the rejected one, and likely.

        loss = -log sigmoid(beta * (log p(chosen) - log p(rejected))) - nll_coeff * m_w

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, or None: only metrics read them.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the margin, per nat.
        nll_coeff: weight of the likelihood.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2401.08417.
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
    margin = pairs.chosen - pairs.rejected
    losses = -logsigmoid(beta * margin) - nll_coeff * pairs.mean_chosen
    return pairs.loss_and_metrics(losses, beta)


def orpo(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    odds_coeff: float = ODDS_COEFF.default,
) -> LossAndMetrics:
    """Supervised learning of the chosen completion, with an odds ratio against the rejected one.

        loss = -m_w - odds_coeff * log sigmoid(o_w - o_l), log odds o = m - log(1 - exp(m))

    The likelihood leaves the prompt out (TRL's does not).

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, or None: only metrics read them.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        odds_coeff: weight of the odds ratio.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2403.07691.
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
    # At probability 1 the odds are infinite.
    chosen = pairs.mean_chosen.clamp(max=-1e-6)
    rejected = pairs.mean_rejected.clamp(max=-1e-6)
    log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
    losses = -pairs.mean_chosen - odds_coeff * logsigmoid(log_odds)
    return pairs.loss_and_metrics(losses)


def power(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
    *,
    beta: float = POWER_BETA.default,
    nll_coeff: float = POWER_NLL_COEFF.default,
) -> LossAndMetrics:
    """Preference between length-corrected rewards, with the chosen completion's likelihood.

        loss = -log sigmoid(beta * ((L_w + 1) / n_w - (L_l + 1) / n_l)) - nll_coeff * beta * m_w

    L is the summed log-probability.

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, or None: only metrics read them.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
        beta: scale of the margin.
        nll_coeff: weight of the likelihood, times beta.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: arXiv:2412.09544, without its dynamic labels.
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
    margin = pairs.mean_chosen - pairs.mean_rejected
    margin = margin + 1 / pairs.chosen_length - 1 / pairs.rejected_length
    losses = -logsigmoid(beta * margin) - nll_coeff * beta * pairs.mean_chosen
    return pairs.loss_and_metrics(losses, beta)


def nll(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
) -> LossAndMetrics:
    """Negative log-likelihood per token of the chosen completion: the supervised anchor to mix in.

        loss = -m_w

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, or None: only metrics read them.
        chosen_lengths, rejected_lengths: [N] trained tokens of each.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.

    Returns:
        The scalar to minimize, and the metrics of a pair loss.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`, or one that is read is None.

    Source: the maximum-likelihood objective; a mean over pairs, not over tokens.
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
    return pairs.loss_and_metrics(-pairs.mean_chosen)
