"""Ranks that read images beside ranks that read none.

A vision tower runs only where there are images. Where weights are cut up over ranks, each of its
layers is gathered by all of them together: a rank that does not run it would leave the others
waiting. So where some rank has images, the others read a row with images as well, beside their own,
of which nothing is trained: its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from oxrl.tables.vision import PATCHES
from oxrl.types import Ragged, Tensors, TokenBatch

FIELDS = ("tokens", "attention_mask", "response_mask", "position_ids")


class DummyRows:
    """The rows that ranks read beside their own.

    Args:
        inputs: the whole batch.
        patches: of the images of each unit's rows, [units, rows of a unit] int64.
        shares: of each rank its micro-batches, one per round: indices of units, int64.
    """

    def __init__(
        self, inputs: TokenBatch, patches: Tensor, shares: Sequence[Sequence[Tensor]]
    ) -> None:
        self._inputs = inputs
        self._patches = patches
        # The rounds in which some rank reads an image and another reads none.
        seen: list[set[int]] = []
        for share in shares:
            seen.append({turn for turn, units in enumerate(share) if patches[units].any()})
        self._apart = set.union(*seen) - set.intersection(*seen)

    def beside(self, turn: int, read: TokenBatch, *, alone: bool) -> TokenBatch:
        """Return a rank's rows in a round, and one with images where only other ranks have any.

        Args:
            turn: the round.
            read: the rank's rows.
            alone: they are nobody's, and not read then.
        """
        if turn not in self._apart or PATCHES in read.extras and len(read.extras[PATCHES].values):
            return read
        company = self._company().to(read.tokens.device)
        return company if alone else side_by_side(read, company)

    def _company(self) -> TokenBatch:
        """Return the row [1, T] that has the smallest images, with nothing to be trained."""
        counts = self._patches.flatten()
        smallest = counts.masked_fill(counts == 0, int(counts.max()) + 1).argmin()
        length = int(self._inputs.attention_mask[smallest].sum())
        row = self._inputs.select(smallest[None], length)
        untrained = torch.zeros_like(row.response_mask)
        return replace(row, response_mask=untrained)


def side_by_side(first: TokenBatch, second: TokenBatch) -> TokenBatch:
    """Join the rows of two batches as one batch, as long as the longer of them."""
    fields: Tensors = {}
    for name in FIELDS:
        rows = getattr(first, name)
        if rows is not None:
            fields[name] = pad_sequence([*rows, *getattr(second, name)], batch_first=True)
    columns: Tensors = {}
    for name, rows in first.columns.items():
        # Of a row's first token nothing is ever recorded: what stands there is the fill.
        fill = float(rows.flatten()[0])
        rows = [*rows, *second.columns[name]]
        columns[name] = pad_sequence(rows, batch_first=True, padding_value=fill)
    extras: dict[str, Ragged] = {}
    for name, ragged in first.extras.items():
        extras[name] = _appended(ragged, second.extras[name])
    return TokenBatch(**fields, columns=columns, extras=extras)


def _appended(first: Ragged, second: Ragged) -> Ragged:
    """Append the rows of one to those of the other."""
    ends = second.row_offsets[1:] + first.row_offsets[-1]
    values = torch.cat([first.values, second.values])
    return Ragged(values=values, row_offsets=torch.cat([first.row_offsets, ends]))
