"""Kept sets of a batch, the tokens that each was sampled from: looked at before they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.errors import InvariantError
from oxrl.tables.columns import KEPT
from oxrl.types import Metrics, TokenBatch


def check_kept_sets(inputs: TokenBatch, vocabulary: int | None, step: int) -> Metrics:
    """Refuse kept sets that no sampler records, and say how large they are.

    Each has the token that was sampled, and ids that ascend.

    Args:
        inputs: [B, T], of which every sampled token has a set.
        vocabulary: tokens that the policy can tell apart; None: not known.
        step: in which the tokens were sampled.

    Returns:
        `sampling/kept_mean`, `sampling/kept_max`: tokens in a set.

    Raises:
        InvariantError: a set is none; names step, row and place.
    """
    sets = inputs.list_of_tokens(KEPT)
    tokens = inputs.tokens.flatten()
    ids = sets.values.long()
    # The token whose set an id is in.
    owner = torch.arange(len(tokens)).repeat_interleave(sets.row_offsets.diff())
    same = owner[1:] == owner[:-1]
    falls = ids[1:] <= ids[:-1]
    unsorted = owner[1:][same & falls]
    beyond = owner[ids < 0]
    if vocabulary is not None:
        beyond = owner[(ids < 0) | (ids >= vocabulary)]
    lacks_own = inputs.response_mask.flatten().clone()
    lacks_own[owner[ids == tokens[owner]]] = False
    _refuse("has ids that do not ascend", unsorted, inputs, step)
    _refuse(f"has an id beyond the vocabulary of {vocabulary} tokens", beyond, inputs, step)
    _refuse("lacks the token that was sampled", lacks_own.nonzero()[:, 0], inputs, step)
    counts = inputs.columns[KEPT][inputs.response_mask]
    if not len(counts):
        return {}
    return {
        "sampling/kept_mean": float(counts.double().mean()),
        "sampling/kept_max": float(counts.max()),
    }


def _refuse(what: str, tokens: Tensor, inputs: TokenBatch, step: int) -> None:
    """Raise for the first of some tokens, by their places in the flattened batch."""
    if not len(tokens):
        return
    row, place = divmod(int(tokens[0]), inputs.tokens.shape[1])
    raise InvariantError(
        f"the kept set of a sampled token {what}: samples of step {step}, row {row}, place {place}"
    )
