"""Numbers of uneven count per token, of rows that are sampled: ragged columns of slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from oxrl.data.batching import numbers_of
from oxrl.types import Entries, Ragged


class SlotLists:
    """The numbers of a ragged column of every slot, those of its tokens one after the other.

    Args:
        values: [rows, 0], whose type they have.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        # Numbers of each slot so far.
        self.count = torch.zeros(len(values), dtype=torch.int64, device=values.device)

    def add(self, rows: slice, entries: Ragged) -> Tensor:
        """Put the numbers of one more token of each of m slots behind those that it has.

        Args:
            rows: the slots.
            entries: m rows.

        Returns:
            How many numbers each has, [m] int32.
        """
        sizes = entries.row_offsets.diff().to(self.count.device)
        slot = torch.arange(rows.start, rows.stop, device=sizes.device).repeat_interleave(sizes)
        first = self.count[rows] - entries.row_offsets[:-1].to(sizes.device)
        place = first.repeat_interleave(sizes) + torch.arange(len(slot), device=sizes.device)
        self.count[rows] += sizes
        self._make_room(int(self.count[rows].max()))
        self.values[slot, place] = entries.values
        return sizes.to(torch.int32)

    def put(self, slot: int, entries: Entries) -> list[int]:
        """Take in what was recorded of a slot's tokens elsewhere; how many numbers each has."""
        size = self.values.dtype.itemsize
        numbers = numbers_of(bytearray().join(entries), self.values.dtype)
        self.count[slot] = len(numbers)
        self._make_room(len(numbers))
        self.values[slot, : len(numbers)] = numbers
        return [len(entry) // size for entry in entries]

    def entries(self, slot: int, sizes: Sequence[int]) -> list[bytes]:
        """The entries of a slot's tokens, from how many numbers each has."""
        whole = self.values[slot, : int(self.count[slot])].cpu().numpy().tobytes()
        found: list[bytes] = []
        start = 0
        for size in sizes:
            end = start + size * self.values.dtype.itemsize
            found.append(whole[start:end])
            start = end
        return found

    def _make_room(self, most: int) -> None:
        """Widen every slot to at least so many numbers."""
        room = self.values.shape[1]
        if most > room:
            self.values = pad(self.values, (0, max(most, room * 3 // 2) - room))
