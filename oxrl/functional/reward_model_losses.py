"""Losses that train a reward model: on pairs of completions (Bradley-Terry) and on steps (process
rewards).

A loss is (losses * loss_weights).sum(): the weight is 1 / (pairs or step ends of the global batch),
0 for what to leave out. It returns the scalar to minimize and metrics under `reward_model/`;
ValueError where shapes differ.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oxrl.functional.masks import fill_masked, masked_mean, require_same_shape
from oxrl.functional.preference_losses import Loss, weighted_loss


def bradley_terry(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    loss_weights: Tensor,
    margins: Tensor | None = None,
    *,
    center_coeff: float = 0.0,
) -> Loss:
    """-log sigmoid(s_w - s_l - margin) + center_coeff * (s_w + s_l)**2. InstructGPT,
    arXiv:2203.02155, Eq. 1.

    Margins (Llama 2, arXiv:2307.09288, Eq. 2): by how much the chosen one is better, in score
    units. Scores are known up to a constant per prompt; centering (arXiv:2312.09244: 0.01) fixes
    it. All [N]; scores are those at the last real token. Metrics: accuracy (a tie counts one half),
    margin, score_mean, score_std.
    """
    require_same_shape(
        loss_weights=loss_weights,
        chosen_scores=chosen_scores,
        rejected_scores=rejected_scores,
        margins=margins,
    )
    trained = loss_weights != 0
    chosen, rejected = fill_masked(chosen_scores, trained), fill_masked(rejected_scores, trained)
    gap = chosen - rejected
    wanted = gap if margins is None else gap - fill_masked(margins.detach(), trained)
    loss = weighted_loss(
        -F.logsigmoid(wanted) + center_coeff * (chosen + rejected).square(), loss_weights
    )
    with torch.no_grad():
        scores, both = torch.cat((chosen, rejected)), torch.cat((trained, trained))
        mean = masked_mean(scores, both)
        metrics = {
            "reward_model/accuracy": masked_mean((gap.sign() + 1) / 2, trained),
            "reward_model/margin": masked_mean(gap, trained),
            "reward_model/score_mean": mean,
            "reward_model/score_std": masked_mean((scores - mean).square(), both).sqrt(),
        }
    return loss, metrics


def process_reward(step_scores: Tensor, step_labels: Tensor, loss_weights: Tensor) -> Loss:
    """Binary cross-entropy of step labels at the tokens that end a step. arXiv:2305.20050,
    arXiv:2211.14275.

    All [B, T], token-aligned, read where a weight is not 0. A score is the logit of a right step
    (of a two-class head: logit_1 - logit_0), a label 1 right and 0 wrong, or between. Metrics:
    accuracy, score_mean, label_mean.
    """
    require_same_shape(loss_weights=loss_weights, step_scores=step_scores, step_labels=step_labels)
    ends = loss_weights != 0
    scores, labels = fill_masked(step_scores, ends), fill_masked(step_labels.detach(), ends)
    losses = -labels * F.logsigmoid(scores) - (1 - labels) * F.logsigmoid(-scores)
    with torch.no_grad():
        right = ((scores > 0) == (labels > 0.5)).to(scores.dtype)
        values = {"accuracy": right, "score_mean": scores, "label_mean": labels}
        metrics = {
            f"reward_model/{name}": masked_mean(value, ends) for name, value in values.items()
        }
    return weighted_loss(losses, loss_weights), metrics


def potential_rewards(step_scores: Tensor, step_mask: Tensor) -> Tensor:
    """Dense rewards [B, T] from step scores: score at this step's end minus the one before, 0
    before the first.

    A sum of scores would pay for more steps; differences telescope to the last score, so a step
    that changes no score changes no return. `step_scores` [B, T] probabilities or values;
    `step_mask` [B, T] bool, True where a step ends.
    """
    scores = fill_masked(step_scores, step_mask)
    # Index of the latest step end strictly before t, or -1.
    positions = torch.arange(scores.shape[1], device=scores.device).expand_as(step_mask)
    latest = torch.where(step_mask, positions, -1).cummax(1).values.roll(1, 1)
    latest[:, 0] = -1
    previous = torch.where(latest >= 0, scores.gather(1, latest.clamp(min=0)), 0.0)
    return torch.where(step_mask, scores - previous, 0.0)
