"""Divergences of the policy from a teacher, estimated from candidates and the sampled token.

A divergence of two distributions over the vocabulary is a sum over its tokens,

    D(S, T) = sum_v g(S_v, T_v)                  S: the policy, T: the teacher

Probabilities add up to 1, so what all derivatives dg/dS_v have in common moves nothing. Without the
part that stands at S = T too, the derivative is the weight w_v, and

    grad D = sum_v w_v grad S_v                  w_v = dg/dS_v - (dg/dS_v at S_v = T_v)

Of most tokens neither probability is known. Let K be any set of candidates that the tokens before
decide alone, and y the token that was sampled, by mu:

    gradient of   sum_{v in K} S_v w_v      + [y not in K] (S_y / mu_y) w_y           w held fixed
    value         sum_{v in K} g(S_v, T_v)  + [y not in K] g(S_y, T_y) / mu_y

Both have the mean over y that D and its gradient have, for every K and mu. Where S = T the gradient
is 0 for each single y, because every w is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.functional.masks import (
    LossAndMetrics,
    OptionalTensor,
    fill_masked,
    masked_mean,
    require_same_shape,
    weighted_sum,
)
from oxrl.functional.ratios import MAX_LOG_RATIO
from oxrl.tables.numbers import CANDIDATES_REST, DIVERGENCE_ALPHA, LEAST_ALPHA, Rest

# Of 1 / mu: float32 ends at exp(88).
MAX_LOG_INVERSE = 80.0
# Nats of a candidate that there is none of: it adds 0 to everything.
ABSENT = -1e4


class Share(NamedTuple):
    """The part of a divergence that tokens add, of any shape: `value` is g, `weight` is w."""

    value: Tensor
    weight: Tensor


# The share of tokens by their log-probabilities: of the policy, and of the teacher.
Divergence = Callable[[Tensor, Tensor], Share]


class Told(NamedTuple):
    """The words of both models on some tokens of every position, [B, T, N] nats, the policy's with
    gradient.
    """

    policy: Tensor
    teacher: Tensor


def reverse_kl(policy: Tensor, teacher: Tensor) -> Share:
    """Measure KL(S || T), which is large where the policy says what the teacher would not.

    g = S (log S - log T)        w = log S - log T

    Args:
        policy, teacher: log-probabilities in nats, of one shape.

    Returns:
        Of each token.
    """
    gap = policy - teacher
    return Share(value=policy.exp() * gap, weight=gap)


def forward_kl(policy: Tensor, teacher: Tensor) -> Share:
    """Measure KL(T || S), which is large where the policy does not say what the teacher would.

    g = T (log T - log S)        w = 1 - T / S

    Args:
        policy, teacher: log-probabilities in nats, of one shape.

    Returns:
        Of each token; T / S is at most exp(20) in its weight.
    """
    gap = teacher - policy
    bounded = gap.clamp(max=MAX_LOG_RATIO)
    return Share(value=teacher.exp() * gap, weight=-bounded.expm1())


def jensen_shannon(alpha: float) -> Divergence:
    """Return a divergence between the two KLs.

    alpha KL(T || M) + (1 - alpha) KL(S || M)        M = (1 - alpha) S + alpha T
    w = (1 - alpha) (log S - log M)

    Args:
        alpha: in [0.01, 0.99]. Divided by alpha (1 - alpha) it goes to KL(T || S) as alpha goes to
            0, and to KL(S || T) as alpha goes to 1.

    Raises:
        ValueError: alpha is outside of that.
    """
    if not LEAST_ALPHA <= alpha <= 1 - LEAST_ALPHA:
        raise ValueError(
            f"alpha = {alpha} is no Jensen-Shannon divergence: it is from {LEAST_ALPHA} to "
            f"{1 - LEAST_ALPHA}, or 0 for KL(teacher || policy), or 1 for KL(policy || teacher)"
        )

    def share(policy: Tensor, teacher: Tensor) -> Share:
        mixture = torch.logaddexp(policy + math.log1p(-alpha), teacher + math.log(alpha))
        weight = (1 - alpha) * (policy - mixture)
        from_teacher = alpha * teacher.exp() * (teacher - mixture)
        return Share(value=from_teacher + policy.exp() * weight, weight=weight)

    return share


def divergence_of(alpha: float) -> Divergence:
    """Return the divergence that a number stands for.

    1        KL(policy || teacher)
    0        KL(teacher || policy)
    between  Jensen-Shannon

    Args:
        alpha: 0, 1, or in [0.01, 0.99].

    Raises:
        ValueError: it stands for none; see `jensen_shannon`.
    """
    if alpha == 1:
        return reverse_kl
    if alpha == 0:
        return forward_kl
    return jensen_shannon(alpha)


def told_of(policy: Tensor, teacher: Tensor, mask: Tensor) -> Told:
    """Replace what must not be read by numbers that add 0.

    Args:
        policy: [B, T, N] nats.
        teacher: [B, T, N] nats, NaN where it has told nothing.
        mask: [B, T] bool, trained tokens.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(top_logprobs=policy, teacher_top_logprobs=teacher)
    known = mask[..., None] & ~teacher.isnan()
    return Told(
        policy=fill_masked(policy, known, ABSENT),
        teacher=fill_masked(teacher.detach(), known, ABSENT),
    )


def estimated_divergence(
    divergence: Divergence, candidates: Told, sampled: Told, log_sampler: Tensor
) -> Tensor:
    """Estimate a divergence from candidates, and the sampled token where it is none of them.

    Args:
        divergence: which one.
        candidates: N may be 0.
        sampled: N = 1.
        log_sampler: [B, T] nats of the sampled token by whoever sampled it; infinity where it is a
            candidate.

    Returns:
        [B, T]; its gradient is that of the divergence, and not the one of its value.
    """
    policy = torch.cat([candidates.policy, sampled.policy], -1)
    teacher = torch.cat([candidates.teacher, sampled.teacher], -1)
    # How often each token counts, in nats: a candidate once, the sampled token 1 / mu times.
    once = torch.zeros_like(candidates.teacher)
    log_counts = torch.cat([once, -log_sampler[..., None]], -1)
    share = divergence(policy.detach(), teacher)
    value = share.value * log_counts.clamp(max=MAX_LOG_INVERSE).exp()
    # For the sampled token S_y / mu_y, which is bounded like every ratio to the sampler.
    push = (policy + log_counts).clamp(max=MAX_LOG_RATIO).exp() * share.weight
    return (value + push - push.detach()).sum(-1)


def biased_divergence(divergence: Divergence, candidates: Told, rest: Rest) -> Tensor:
    """Estimate a divergence from candidates alone, as others do; gradient and value are biased.

    Args:
        divergence: which one.
        candidates: N is at least 1.
        rest: what becomes of all other tokens, see `train.candidates_rest`.

    Returns:
        [B, T], the divergence over fewer tokens.
    """
    policy, teacher = candidates
    if rest == "renormalised":
        policy = policy.log_softmax(-1)
        teacher = teacher.log_softmax(-1)
    elif rest == "tail_bucket":
        policy = torch.cat([policy, _log_of_rest(policy)], -1)
        teacher = torch.cat([teacher, _log_of_rest(teacher)], -1)
    return divergence(policy, teacher).value.sum(-1)


def _log_of_rest(logprobs: Tensor) -> Tensor:
    """[B, T, 1]: log of 1 minus the candidates' probabilities, at least a rounding error's."""
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)
    return rest.clamp(min=torch.finfo(logprobs.dtype).eps).log()


def teacher_divergence(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    top_logprobs: Tensor,
    teacher_top_logprobs: Tensor,
    teacher_logprobs: Tensor,
    sampled_in_top: Tensor,
    correction: OptionalTensor = None,
    divergence_alpha: float = DIVERGENCE_ALPHA.default,
    candidates_rest: Rest = CANDIDATES_REST.default,
) -> LossAndMetrics:
    """Minimise the divergence from the teacher: exact over candidates, sampled for the rest.

    value       sum_{v in K} g(S_v, T_v)     + [y not in K] g(S_y, T_y) / mu_y
    gradient    sum_{v in K} w_v grad S_v    + [y not in K] w_y grad S_y / mu_y
    S: policy, T: teacher, K: candidates, y: sampled, by mu. KL(S || T): g = S w, w = log S - log T;
    KL(T || S): g = T (log T - log S), w = 1 - T / S; between them: see `jensen_shannon`

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of whoever sampled the tokens.
        advantages: [B, T], not read: the divergence needs none.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        top_logprobs: [B, T, K] nats of the candidates, now, with gradient.
        teacher_top_logprobs: [B, T, K] nats of the same by the teacher; NaN: no candidate.
        teacher_logprobs: [B, T] nats of the sampled tokens by the teacher.
        sampled_in_top: [B, T] bool, whether the sampled token is a candidate.
        correction: [B, T] factor of the divergence, detached here; None: 1 (corrections.py).
        divergence_alpha: which divergence, see `divergence_of`.
        candidates_rest: what becomes of tokens that are no candidates.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ, or alpha stands for no divergence.

    Source: GKD, arXiv:2306.13649; the estimate of candidates and sampled token is oxRL's own.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    require_same_shape(mask=mask, teacher_logprobs=teacher_logprobs, sampled_in_top=sampled_in_top)
    divergence = divergence_of(divergence_alpha)
    known = told_of(top_logprobs, teacher_top_logprobs, mask)
    if candidates_rest == "sampled":
        sampled = told_of(logprobs[..., None], teacher_logprobs[..., None], mask)
        sampler = fill_masked(old_logprobs.detach(), mask & ~sampled_in_top, math.inf)
        found = estimated_divergence(divergence, known, sampled, sampler)
    else:
        found = biased_divergence(divergence, known, candidates_rest)
    metrics = {
        "teacher/divergence": masked_mean(found.detach(), mask),
        "teacher/mass": masked_mean(known.policy.detach().exp().sum(-1), mask),
    }
    if correction is not None:
        found = found * fill_masked(correction.detach(), mask)
    return weighted_sum(found, mask, loss_weights), metrics
