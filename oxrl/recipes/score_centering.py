"""The loss of tokens minus its expectation under the sampler. Imported where a row centers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from oxrl.errors import required
from oxrl.functional.centering import CENTERINGS, Outcomes, TokenLoss
from oxrl.functional.gates import LossInputs
from oxrl.functional.masks import LossAndMetrics
from oxrl.functional.ratios import interpolated_anchor
from oxrl.tables.columns import HEAD_IDS, HEAD_LOGPROBS, HEAD_REST
from oxrl.tables.policy import Algorithm
from oxrl.types import Output, PolicyBatch, TensorMap, TokenBatch


class ScoreCentering:
    """The centering of a row, its numbers bound.

    Args:
        algorithm: the row and its numbers.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        name = algorithm.row.centering
        self.center = partial(CENTERINGS[name], **algorithm.numbers("centering", name))

    def __call__(
        self, loss: TokenLoss, tokens: LossInputs, output: Output, batch: PolicyBatch
    ) -> LossAndMetrics:
        """The loss of a micro-batch.

        Args:
            loss: of the row, of tokens that it looks at one at a time.
            tokens: as they were sampled, [B, T].
            output: what the policy says now, of the head and the rest too.
            batch: what the update reads.
        """
        inputs = batch.inputs
        now = outcomes_of(output)
        sampler = sampler_outcomes(inputs.columns)
        outcomes = Outcomes(
            logprobs=now,
            old=old_outcomes(now, sampler, batch),
            sampler=sampler,
            in_head=(head_ids(inputs) == inputs.tokens[..., None]).any(-1),
        )
        return self.center(loss, tokens, outcomes)


def outcomes_of(output: Output) -> Tensor:
    """Log-probabilities of the head and, last, of all other tokens, [B, T, K + 1].

    Args:
        output: of a model that was asked for both.
    """
    head = required(output.top_logprobs, "logprobs of the head")
    rest = required(output.rest_logprobs, "the logprob of the rest")
    return torch.cat([head, rest[..., None]], -1)


def sampler_outcomes(columns: TensorMap) -> Tensor:
    """The same of the sampler, as it was recorded, [B, T, K + 1].

    Args:
        columns: of the batch.
    """
    rest = columns[HEAD_REST][..., None]
    head = columns[HEAD_LOGPROBS].view(*rest.shape[:2], -1)  # a head of one token has no axis
    return torch.cat([head, rest], -1)


def head_ids(inputs: TokenBatch) -> Tensor:
    """The sampler's likeliest tokens, [B, T, K] int32.

    Args:
        inputs: [B, T].
    """
    return inputs.columns[HEAD_IDS].view(*inputs.tokens.shape, -1)


def old_outcomes(now: Tensor, sampler: Tensor, batch: PolicyBatch) -> Tensor:
    """The same of the policy that the update starts from, [B, T, K + 1], detached.

    Args:
        now, sampler: [B, T, K + 1] nats, of the current policy and of the sampler.
        batch: what the update reads.
    """
    if batch.old_outcomes is not None:
        return batch.old_outcomes
    if batch.ages is not None:
        ages = batch.ages[..., None]
        return interpolated_anchor(now, sampler, ages, batch.inputs.response_mask[..., None])
    return now.detach()
