"""Rows are cut into pieces so that the least is read: compared with every possible cut."""

from __future__ import annotations

import itertools
import random

from oxrl.models.shared_prefix import cheapest_cut


def cost(lengths: list[int], pieces: list[int], price: int) -> int:
    total = 0
    first = 0
    for rows in pieces:
        total += rows * lengths[first] + price
        first += rows
    return total


def cuts(count: int) -> list[list[int]]:
    found: list[list[int]] = []
    for borders in itertools.product([False, True], repeat=count - 1):
        pieces = [1]
        for border in borders:
            if border:
                pieces.append(1)
            else:
                pieces[-1] += 1
        found.append(pieces)
    return found


def fits(lengths: list[int], pieces: list[int], most: int) -> bool:
    first = 0
    for rows in pieces:
        if rows > 1 and rows * lengths[first] > most:
            return False
        first += rows
    return True


def test_no_cut_that_fits_is_cheaper() -> None:
    draw = random.Random(0)
    for _ in range(40):
        lengths = sorted((draw.randint(1, 30) for _ in range(draw.randint(1, 8))), reverse=True)
        most = draw.choice([1, 25, 60, 1000])
        price = draw.choice([1, 10, 100])
        pieces = cheapest_cut(lengths, most=most, price=price)
        assert sum(pieces) == len(lengths) and fits(lengths, pieces, most)
        every = [cut for cut in cuts(len(lengths)) if fits(lengths, cut, most)]
        assert cost(lengths, pieces, price) == min(cost(lengths, cut, price) for cut in every)


def test_rows_of_one_length_fill_pieces_from_the_first() -> None:
    assert cheapest_cut([5] * 10, most=20, price=3) == [4, 4, 2]
    assert cheapest_cut([], most=20, price=3) == []
