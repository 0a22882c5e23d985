"""Ranks that read images beside ranks that read none.

A vision tower runs only where there are images. Where weights are cut up over ranks, each of its
layers is gathered by all of them together: a rank that does not run it would leave the others
waiting. So where some rank has images, the others read a row with images as well, beside their own,
of which nothing is trained: its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oxrl.tables.vision import PATCHES
from oxrl.types import TokenBatch


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
        counts = patches.flatten()
        # The row that has the smallest images, [1].
        self._smallest = counts.masked_fill(counts == 0, int(counts.max()) + 1).argmin()[None]
        # The rounds in which some rank reads an image and another reads none.
        seen: list[set[int]] = []
        for share in shares:
            seen.append({turn for turn, units in enumerate(share) if patches[units].any()})
        self._apart = set.union(*seen) - set.intersection(*seen)

    def beside(self, turn: int, rows: Tensor, read: TokenBatch) -> TokenBatch:
        """Return a rank's rows in a round, and one with images where only other ranks have any.

        Args:
            turn: the round.
            rows: of the whole batch, those that are the rank's, int64; there may be none.
            read: the same rows, or what it reads where it has none.
        """
        if turn not in self._apart or PATCHES in read.extras and len(read.extras[PATCHES].values):
            return read
        least = int(self._inputs.attention_mask[self._smallest].sum())
        length = max(least, read.tokens.shape[1])
        joined = self._inputs.select(torch.cat([rows, self._smallest]), length)
        joined.response_mask[-1] = False  # of a copy
        return joined.to(read.tokens.device)
