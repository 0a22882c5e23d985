"""Score centering: from the loss of every token its expectation under the sampler is subtracted.

Of the token y that the sampler q drew, with the advantage A and the loss l of a token:

    L = l(y) - sum_v q(v) l(v)          A of y in every l(v)

The gradient of l(y) is -A w_y s_y, where s_y = grad log p(y) is its score and w_y what gate, ratio
and correction make of it. Over y ~ q the gradient of L is 0 for an A that does not depend on y:
what all tokens of a place have in common moves nothing. Where w is the whole ratio p / q, or p is
q, the second term has no gradient, and nothing changes. What is left is the covariance of A and
w s, which is one under q: centering takes the drift out, and makes no gradient of samples of q one
of p.

Of q the K likeliest tokens are known, the head, and log q of all others together, the tail. So the
sum has K + 1 terms, each from the row's own gate: the tail is one event, as likely as its tokens
are together. `center_tail` says what a sampled token of the tail is trained as:

    event   as the tail: the mean over q is 0 to rounding, whatever K is
    token   as itself: the estimator of arXiv:2609.20807, whose mean is not 0 while there is a tail
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.functional.gates import LossInputs
from oxrl.functional.masks import LossAndMetrics, masked_mean
from oxrl.tables.numbers import CENTER_TAIL, Tail

# What a row makes of tokens: ratio, correction and gate.
TokenLoss = Callable[[LossInputs], LossAndMetrics]


class Outcomes(NamedTuple):
    """The outcomes in the place of every token: K tokens and, last, all others together.

    logprobs: [B, T, K + 1] nats of the current policy, with gradient.
    old: [B, T, K + 1], of the policy that the update starts from.
    sampler: [B, T, K + 1], of the sampler; what it cannot sample has none (-inf, or exp of it is 0)
        and is left out, whatever stands elsewhere.
    in_head: [B, T] bool, the sampled token is one of the K.
    """

    logprobs: Tensor
    old: Tensor
    sampler: Tensor
    in_head: Tensor


def score_centering(
    loss: TokenLoss,
    tokens: LossInputs,
    outcomes: Outcomes,
    *,
    center_tail: Tail = CENTER_TAIL.default,
) -> LossAndMetrics:
    """Minus its expectation under the sampler, the loss of every token has no drift.

    L = l(y) - sum over the K likeliest tokens of q(v) l(v), minus q(tail) l(tail)
        l(v): the row's own gate, ratio and correction of v, with y's advantage
        y of the tail: l(tail) in place of l(y) (center_tail event), or l(y) (token)

    The mean over y ~ q of the gradient of L at a constant advantage is 0 (event): a baseline that
    is off moves nothing. That is no unbiasedness: the covariance of advantage and score stays that
    of the sampler. With token it is q(tail) times how far the mean score of the sampler's tail is
    from the score of the tail.

    Args:
        loss: of the row, of tokens that it looks at one at a time.
        tokens: as they were sampled, [B, T] each.
        outcomes: what may have been sampled instead of each.
        center_tail: what a sampled token of the tail is trained as.

    Returns:
        Scalar loss; the metrics of the sampled tokens, and how many of them were of the tail.

    Source: arXiv:2609.20807, whose equation 14 is this of one gate with center_tail token; the tail
    as one event is oxRL's own.
    """
    own = tokens
    if center_tail == "event":
        own = tokens._replace(
            logprobs=torch.where(outcomes.in_head, tokens.logprobs, outcomes.logprobs[..., -1]),
            old=torch.where(outcomes.in_head, tokens.old, outcomes.old[..., -1]),
            sampler=torch.where(outcomes.in_head, tokens.sampler, outcomes.sampler[..., -1]),
        )
    sampled, metrics = loss(own)
    expected, _ = loss(every_outcome(tokens, outcomes))
    in_tail = masked_mean(~outcomes.in_head, tokens.mask)
    return sampled - expected, metrics | {"update/center_tail_frac": in_tail}


def every_outcome(tokens: LossInputs, outcomes: Outcomes) -> LossInputs:
    """All that may have been sampled, as tokens that count by the sampler's probability of them.

    Args:
        tokens: as they were sampled, [B, T] each.
        outcomes: what may have been sampled instead, [B, T, K + 1].

    Returns:
        [B, T * (K + 1)] each.
    """
    chance = outcomes.sampler.detach().exp()
    possible = tokens.mask[..., None] & (chance > 0)

    def flat(values: Tensor) -> Tensor:
        return values.expand_as(chance).flatten(1)

    return LossInputs(
        logprobs=flat(outcomes.logprobs),
        old=flat(outcomes.old),
        sampler=flat(outcomes.sampler),
        advantages=flat(tokens.advantages[..., None]),
        mask=flat(possible),
        loss_weights=flat(tokens.loss_weights[..., None] * chance),
    )


# Row.centering -> its function. "none" is not listed: nothing is subtracted then.
CENTERINGS = {"score": score_centering}
