"""Rows with images in micro-batches: their patches, and ranks that read images beside ranks that
read none.

Patches take some of a micro-batch's budget. A vision tower runs only where there are images. Where
weights are cut up over ranks, each of its layers is gathered by all of them together: a rank that
does not run it would leave the others waiting. So where some rank has images, the others read a row
with images as well, beside their own, of which nothing is trained: its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from oxrl.tables.vision import PATCHES
from oxrl.types import Ragged, Tensors, TokenBatch, TrainBatch

FIELDS = ("tokens", "attention_mask", "response_mask", "position_ids", "candidates")


def patches_per_row(patches: Ragged, units: int) -> Tensor:
    """Count the patches of the images of each unit, per row of it, [units] int64.

    Args:
        patches: of every image.
        units: rows, or pairs of rows.
    """
    ends = patches.row_offsets.tolist()
    counts = [int(patches.values[start:end].sum()) for start, end in pairwise(ends)]
    per_unit = torch.tensor(counts).view(units, -1)
    return -(-per_unit.sum(1) // per_unit.shape[1])


def cut_by_patches(
    own: Tensor, lengths: list[int], patches: Ragged, units: int, budget: int
) -> list[int]:
    """Return the number of units in each micro-batch of a rank: a vision tower reads patches, too.

    Args:
        own: indices of the rank's units, int64, longest first.
        lengths: of their longest rows, in tokens.
        patches: of every image of the batch.
        units: of the whole batch.
        budget: tokens and patches of a micro-batch, per row of a unit.
    """
    per_unit = patches_per_row(patches, units)[own].tolist()
    cut: list[int] = []
    start = 0
    seen = 0
    for at, count in enumerate(per_unit):
        seen += count
        padded = lengths[start] * (at + 1 - start)
        if at > start and padded + seen > budget:
            cut.append(at - start)
            start = at
            seen = count
    if lengths:
        cut.append(len(lengths) - start)
    return cut


class DummyRows:
    """The rows that ranks read beside their own.

    Args:
        batch: the whole batch.
        shares: of each rank its micro-batches, one per round: indices of units, int64.
    """

    def __init__(self, batch: TrainBatch, shares: Sequence[Sequence[Tensor]]) -> None:
        self._inputs = batch.inputs
        self._apart = rounds_apart(batch, shares)

    def beside(self, turn: int, read: TokenBatch) -> TokenBatch:
        """Return a rank's rows in a round, and one with images where only other ranks have any.

        Args:
            turn: the round.
            read: the rank's rows.
        """
        if turn not in self._apart or len(read.extras[PATCHES].values):
            return read
        return side_by_side(read, company(self._inputs).to(read.tokens.device))

    def alone(self, turn: int, idle: TokenBatch) -> TokenBatch:
        """Return the rows that a rank without rows of its own reads in a round.

        Args:
            turn: the round.
            idle: where nobody reads images.
        """
        return company(self._inputs) if turn in self._apart else idle


def rounds_apart(batch: TrainBatch, shares: Sequence[Sequence[Tensor]]) -> set[int]:
    """Find the rounds in which some rank reads an image and another reads none.

    Args:
        batch: the whole batch.
        shares: of each rank its micro-batches, one per round: indices of units, int64.
    """
    patches = batch.inputs.extras.get(PATCHES)
    if patches is None or len(shares) == 1 or not len(batch):
        return set()
    counts = patches_per_row(patches, len(batch))
    seen: list[set[int]] = []
    for share in shares:
        seen.append({turn for turn, units in enumerate(share) if counts[units].any()})
    return set.union(*seen) - set.intersection(*seen)


def company(inputs: TokenBatch) -> TokenBatch:
    """Return the row [1, T] of a batch that has the smallest images, with nothing to be trained.

    Args:
        inputs: some row of it has images.
    """
    counts = patches_per_row(inputs.extras[PATCHES], len(inputs))
    none = counts == 0
    smallest = counts.masked_fill(none, int(counts.max()) + 1).argmin()
    length = int(inputs.attention_mask[smallest].sum())
    row = inputs.select(smallest[None], length)
    untrained = torch.zeros_like(row.response_mask)
    return replace(row, response_mask=untrained)


def side_by_side(first: TokenBatch, second: TokenBatch) -> TokenBatch:
    """Join the rows of two batches as one batch, as long as the longer of them."""
    length = max(first.tokens.shape[1], second.tokens.shape[1])
    fields: Tensors = {}
    for name in FIELDS:
        pieces = [getattr(first, name), getattr(second, name)]
        if pieces[0] is not None:
            fields[name] = torch.cat([_widened(piece, length) for piece in pieces])
    extras: dict[str, Ragged] = {}
    for name, ragged in first.extras.items():
        extras[name] = _appended(ragged, second.extras[name])
    return TokenBatch(**fields, extras=extras)


def _widened(values: Tensor, length: int) -> Tensor:
    """Return [B, T, ...] with zeros up to `length` along T."""
    missing = length - values.shape[1]
    zeros = values.new_zeros(len(values), missing, *values.shape[2:])
    return torch.cat([values, zeros], dim=1)


def _appended(first: Ragged, second: Ragged) -> Ragged:
    """Append the rows of one to those of the other."""
    ends = second.row_offsets[1:] + first.row_offsets[-1]
    values = torch.cat([first.values, second.values])
    return Ragged(values=values, row_offsets=torch.cat([first.row_offsets, ends]))
