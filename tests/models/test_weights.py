from __future__ import annotations

import pytest
import torch

from oxrl.models.fingerprints import fingerprint

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


def test_a_fingerprint_is_of_the_values_not_of_where_they_lie() -> None:
    numbers = torch.arange(1, 100, dtype=torch.bfloat16)
    assert fingerprint(numbers[3:50]) == fingerprint(numbers[3:50].clone())
    assert fingerprint(numbers.view(9, 11).t()) == fingerprint(numbers.view(9, 11).t().contiguous())
    assert fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(0, 3))
