from __future__ import annotations

import itertools
import math

import pytest
import torch

from oxrl.models.fingerprints import Piece, fingerprint, joined, piece_of, pieces_of

# Below, at and above what is summed at once: 2**14 words of 8 bytes.
SIZES = [1, 7, 8, 9, 4096, 2**17 - 1, 2**17, 2**17 + 3, 3 * 2**17 + 8]


@pytest.mark.parametrize("size", SIZES)
def test_a_fingerprint_moves_with_any_one_bit_and_with_the_length(size: int) -> None:
    data = torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
    )
    seen = {
        fingerprint(data),
        fingerprint(torch.cat([data, data.new_zeros(1)])),
        fingerprint(data[1:]),
    }
    places = sorted({0, size // 3, size // 2, size - 1})
    for at in places:
        for bit in (1, 128):
            changed = data.clone()
            changed[at] ^= bit
            seen.add(fingerprint(changed))
    assert len(seen) == 3 + 2 * len(places)
    assert fingerprint(data.clone()) == fingerprint(data)


def test_a_fingerprint_moves_when_two_values_or_two_rows_change_places() -> None:
    matrix = torch.randn(8, 2**14)
    rows = matrix[[1, 0, *range(2, 8)]]
    values = matrix.clone()
    values[0, 3], values[5, 9] = matrix[5, 9], matrix[0, 3]
    assert len({fingerprint(tensor) for tensor in (matrix, rows, values, matrix.t())}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(5, 6), (7, 8), (3, 2, 4), (9,), (1, 5), (4, 1), ()])
def test_pieces_of_a_weight_add_up_to_it_wherever_it_is_cut(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    size = math.prod(shape)
    weight = torch.arange(3, 3 + size).to(dtype).view(shape)
    values = weight.flatten()
    whole = fingerprint(weight)
    for first in range(size + 1):
        for second in range(first, size + 1, 3):
            ends = [0, first, second, size]
            found: list[Piece] = []
            for begin, end in itertools.pairwise(ends):
                found += pieces_of(values[begin:end], weight.shape, begin)
            assert joined(found) == whole, ends
            assert joined(reversed(found)) == joined([*found, *found]) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_piece_counts_by_its_place_in_the_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = fingerprint(weight)
    top = piece_of(weight[:3])
    for row in range(6):
        lower = piece_of(weight[3:], row=row)
        assert (joined([top, lower]) == whole) == (row == 3)
    left = piece_of(weight[:, :5])
    for column in range(9):
        right = piece_of(weight[:, 5:], column=column)
        assert (joined([left, right]) == whole) == (column == 5)
    # Four corners; and one of them is missing, or at the place of another.
    corners = [
        piece_of(weight[row : row + 4, column : column + 6], row=row, column=column)
        for row in (0, 4)
        for column in (0, 6)
    ]
    assert joined(corners) == whole
    assert joined(corners[1:]) != whole
    exchanged = [
        piece_of(weight[4:, :6], row=0, column=6),
        piece_of(weight[:4, 6:], row=4, column=0),
    ]
    assert joined([corners[0], *exchanged, corners[3]]) != whole


def test_a_fingerprint_is_of_the_values_not_of_where_they_lie() -> None:
    numbers = torch.arange(1, 100, dtype=torch.bfloat16)
    assert fingerprint(numbers[3:50]) == fingerprint(numbers[3:50].clone())
    assert fingerprint(numbers.view(9, 11).t()) == fingerprint(numbers.view(9, 11).t().contiguous())
    assert fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(0, 3))
