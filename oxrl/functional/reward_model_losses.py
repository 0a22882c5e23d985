"""Losses that train a reward model: on pairs of completions (Bradley-Terry) and on steps (process rewards)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from oxrl.functional.masks import fill_masked, masked_mean, require_same_shape
from oxrl.functional.preference_pairs import Loss, weighted_loss


def bradley_terry(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    loss_weights: Tensor,
    margins: Tensor | None = None,
    *,
    center_coeff: float = 0.0,
) -> Loss:
    """-log sigmoid(s_w - s_l - margin) + center_coeff * (s_w + s_l)**2.

    Source: InstructGPT, arXiv:2203.02155, Eq. 1; margin: Llama 2, arXiv:2307.09288, Eq. 2; centering: arXiv:2312.09244
    (0.01). Scores are known only up to a constant per prompt; centering fixes it.

    Args:
        chosen_scores, rejected_scores: [N], the scalar head at the last real token.
        loss_weights: [N], 1 / (pairs of the global batch), 0 for a pair to leave out.
        margins: [N] or None for 0: by how much the chosen one is better, in score units.
        center_coeff: not negative.

    Returns:
        Scalar loss to minimize; metrics accuracy (a tie counts one half), margin, score_mean, score_std,
        under `reward_model/`.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(
        loss_weights=loss_weights, chosen_scores=chosen_scores, rejected_scores=rejected_scores, margins=margins
    )
    trained = loss_weights != 0
    chosen, rejected = fill_masked(chosen_scores, trained), fill_masked(rejected_scores, trained)
    gap = chosen - rejected
    wanted = gap if margins is None else gap - fill_masked(margins.detach(), trained)
    loss = weighted_loss(-F.logsigmoid(wanted) + center_coeff * (chosen + rejected).square(), loss_weights)
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
    """Binary cross-entropy of step labels, on the token that ends each step.

    Source: arXiv:2305.20050 and arXiv:2211.14275. A score is a logit, of the probability that the step is right; a
    two-class head gives the same loss with score = logit_1 - logit_0.

    Args:
        step_scores: [B, T] logits, token-aligned.
        step_labels: [B, T], 1 right and 0 wrong, read where a step ends; values between are soft labels.
        loss_weights: [B, T], 1 / (steps of the global batch) where a step ends, 0 elsewhere.

    Returns:
        Scalar loss to minimize; metrics accuracy, score_mean, label_mean over the step ends, under `reward_model/`.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(loss_weights=loss_weights, step_scores=step_scores, step_labels=step_labels)
    ends = loss_weights != 0
    scores, labels = fill_masked(step_scores, ends), fill_masked(step_labels.detach(), ends)
    losses = -labels * F.logsigmoid(scores) - (1 - labels) * F.logsigmoid(-scores)
    with torch.no_grad():
        right = ((scores > 0) == (labels > 0.5)).to(scores.dtype)
        values = {"accuracy": right, "score_mean": scores, "label_mean": labels}
        metrics = {f"reward_model/{name}": masked_mean(value, ends) for name, value in values.items()}
    return weighted_loss(losses, loss_weights), metrics


def potential_rewards(step_scores: Tensor, step_mask: Tensor) -> Tensor:
    """Dense rewards from step scores: score of this step's end minus that of the one before, 0 before the first.

    A sum of scores would pay for more steps; differences telescope, so that an inserted step that changes no score
    changes no return.

    Args:
        step_scores: [B, T] probabilities or values. step_mask: [B, T] bool, True where a step ends.

    Returns:
        [B, T], 0 off the step ends; each row sums to its last step's score.
    """
    scores = fill_masked(step_scores, step_mask)
    # Index of the latest step end strictly before t, or -1.
    positions = torch.arange(scores.shape[1], device=scores.device).expand_as(step_mask)
    latest = torch.where(step_mask, positions, -1).cummax(1).values.roll(1, 1)
    latest[:, 0] = -1
    previous = torch.where(latest >= 0, scores.gather(1, latest.clamp(min=0)), 0.0)
    return torch.where(step_mask, scores - previous, 0.0)
