"""The cheapest way to cut rows of unlike lengths into padded pieces: the fewest tokens are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def cheapest_cut(lengths: Sequence[int], *, most: int, price: int) -> list[int]:
    """Rows of every piece, so that the sum over pieces of `rows x longest + price` is least.

    Where two cuts cost the same, earlier pieces are larger. By dynamic programming from the end.

    Args:
        lengths: of the rows, the longest first.
        most: tokens of a piece, padding included; a longer row is a piece of its own.
        price: of a piece, in tokens.
    """
    count = len(lengths)
    if count and lengths[0] * count <= most and lengths[0] * count - sum(lengths) <= price:
        return [count]
    costs = torch.zeros(count + 1, dtype=torch.int64)
    every = torch.arange(1, count + 1)
    taken = [0] * count
    for first in range(count - 1, -1, -1):
        length = lengths[first]
        fitting = min(count - first, max(1, most // length))
        rows = every[:fitting]
        found = length * rows + costs[first + 1 : first + 1 + fitting]
        # Of equal costs that with the most rows.
        best = int((found * (count + 1) - rows).argmin())
        taken[first] = best + 1
        costs[first] = found[best] + price
    pieces: list[int] = []
    first = 0
    while first < count:
        pieces.append(taken[first])
        first += pieces[-1]
    return pieces
