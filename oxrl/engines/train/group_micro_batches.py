"""How a batch is cut where rows that begin alike are computed together."""

from __future__ import annotations

import torch

from oxrl.engines.train.micro_batches import MicroBatch, micro_batches
from oxrl.models.prefix_layout import Group, groups_of
from oxrl.types import TokenBatch, TrainBatch


def group_micro_batches(
    batch: TrainBatch, *, budget: int, ranks: int = 1, price: int | None = None
) -> list[list[MicroBatch]]:
    """As `micro_batches`, with the rows of a prompt side by side as far as they fit.

    Args:
        batch: what is cut; of pairs, whose two rows are side by side anyway, nothing changes.
        budget: tokens that the model reads: a prompt once, and its responses.
        ranks: how many share the batch.
        price: of a micro-batch where rows have nothing in common.
    """
    if len(batch) != len(batch.inputs) or len(batch) == 0:
        return micro_batches(batch, budget=budget, ranks=ranks, price=price)
    groups = groups_of(batch.inputs)
    if len(groups) == len(batch):  # nothing in common
        return micro_batches(batch, budget=budget, ranks=ranks, price=price)
    pieces: list[Group] = []
    for group in groups:
        pieces += _fitting(group, batch.inputs, budget)
    pieces.sort(key=_tokens, reverse=True)
    lengths = batch.inputs.lengths()
    return [_filled(pieces[rank::ranks], lengths, budget) for rank in range(ranks)]


def _tokens(group: Group) -> int:
    return group.tokens


def _fitting(group: Group, inputs: TokenBatch, budget: int) -> list[Group]:
    """A group in pieces of at most `budget` tokens, each with the prompt; longest rows first."""
    lengths = inputs.lengths()
    pieces: list[Group] = []
    rows: list[int] = []
    responses = 0
    for row in sorted(group.rows, key=lambda row: -lengths[row]):
        response = lengths[row] - group.prompt
        if rows and group.prompt + responses + response > budget:
            pieces.append(Group(rows, group.prompt, responses))
            rows = []
            responses = 0
        rows.append(row)
        responses += response
    pieces.append(Group(rows, group.prompt, responses))
    return pieces


def _filled(pieces: list[Group], lengths: list[int], budget: int) -> list[MicroBatch]:
    """Pieces one after the other into micro-batches."""
    cut: list[MicroBatch] = []
    rows: list[int] = []
    used = 0
    for piece in pieces:
        if rows and used + piece.tokens > budget:
            cut.append(_micro_batch(rows, lengths))
            rows = []
            used = 0
        rows += piece.rows
        used += piece.tokens
    if rows:
        cut.append(_micro_batch(rows, lengths))
    return cut


def _micro_batch(rows: list[int], lengths: list[int]) -> MicroBatch:
    longest = max(lengths[row] for row in rows)
    return MicroBatch(torch.tensor(rows, dtype=torch.int64), longest)
