"""Losses that train a reward model: on pairs of completions (Bradley-Terry) and on steps (process
rewards).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from oxrl.functional.masks import fill_masked, masked_mean, require_same_shape
from oxrl.functional.preference_pairs import LossAndMetrics, OptionalTensor, weighted_loss


def bradley_terry(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    loss_weights: Tensor,
    margins: OptionalTensor = None,
    *,
    center_coeff: float = 0.0,
) -> LossAndMetrics:
    """Score the chosen completion above the rejected one.

        loss = -log sigmoid(s_w - s_l - margin) + center_coeff * (s_w + s_l)**2

    Scores are known up to a constant per prompt; centering fixes it.

    Args:
        chosen_scores, rejected_scores: [N], s_w and s_l, at the last real token.
        loss_weights: [N], 1 / pairs of the global batch; 0 leaves a pair out.
        margins: [N], by how much the chosen one is better, in score units.
        center_coeff: pull of the scores of a pair to 0.

    Returns:
        The scalar to minimize, and under `reward_model/`: accuracy (a tie counts one half), margin,
        score_mean, score_std.

    Raises:
        ValueError: shapes differ.

    Source: InstructGPT, arXiv:2203.02155, Eq. 1; margins: Llama 2, arXiv:2307.09288, Eq. 2;
    centering: arXiv:2312.09244, where it is 0.01.
    """
    require_same_shape(
        loss_weights=loss_weights,
        chosen_scores=chosen_scores,
        rejected_scores=rejected_scores,
        margins=margins,
    )
    counted = loss_weights != 0
    chosen = fill_masked(chosen_scores, counted)
    rejected = fill_masked(rejected_scores, counted)
    gap = chosen - rejected
    excess = gap
    if margins is not None:
        excess = gap - fill_masked(margins.detach(), counted)
    centering = center_coeff * (chosen + rejected).square()
    losses = -logsigmoid(excess) + centering
    loss = weighted_loss(losses, loss_weights)
    with torch.no_grad():
        scores = torch.cat((chosen, rejected))
        both = torch.cat((counted, counted))
        mean = masked_mean(scores, both)
        metrics = {
            "reward_model/accuracy": masked_mean((gap.sign() + 1) / 2, counted),
            "reward_model/margin": masked_mean(gap, counted),
            "reward_model/score_mean": mean,
            "reward_model/score_std": masked_mean((scores - mean).square(), both).sqrt(),
        }
    return loss, metrics


def process_reward(
    step_scores: Tensor, step_labels: Tensor, loss_weights: Tensor
) -> LossAndMetrics:
    """Binary cross-entropy of step labels at the tokens that end a step.

        loss = -y log sigmoid(s) - (1 - y) log sigmoid(-s)

    Args:
        step_scores: [B, T], s, the logit of a right step (of a two-class head: logit_1 - logit_0).
        step_labels: [B, T], y, 1 right and 0 wrong, or between.
        loss_weights: [B, T], 1 / step ends of the global batch; 0 where no step ends.

    Returns:
        The scalar to minimize, and under `reward_model/`: accuracy, score_mean, label_mean.

    Raises:
        ValueError: shapes differ.

    Source: arXiv:2305.20050, arXiv:2211.14275.
    """
    require_same_shape(loss_weights=loss_weights, step_scores=step_scores, step_labels=step_labels)
    ends = loss_weights != 0
    scores = fill_masked(step_scores, ends)
    labels = fill_masked(step_labels.detach(), ends)
    losses = -labels * logsigmoid(scores) - (1 - labels) * logsigmoid(-scores)
    with torch.no_grad():
        right = ((scores > 0) == (labels > 0.5)).to(scores.dtype)
        metrics = {
            "reward_model/accuracy": masked_mean(right, ends),
            "reward_model/score_mean": masked_mean(scores, ends),
            "reward_model/label_mean": masked_mean(labels, ends),
        }
    return weighted_loss(losses, loss_weights), metrics
