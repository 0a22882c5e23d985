"""Fingerprints of weights that add up: of a whole tensor, or of the pieces that workers hold of it.

    sum over rows r and columns c of  A[r] * B[c] * bits[r, c]   modulo 2**64

`bits` is a value as an integer, A and B are random numbers that only depend on the index: a value
that changes, or changes places, moves the sum, and several changes cancel with a probability of
about 2**-60. It guards against faults, not malice. Values that kernels take for zero (-0.0 and, of
float32 and bfloat16, denormal numbers) count as zero, so that a weight can also be read back
through the layer that computes with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

WORD_BYTES = 8
# What is read at once: about what a core's cache holds.
CHUNK_BYTES = 2**20
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROWS = 1
COLUMNS = 2


class Piece(NamedTuple):
    """A rectangle of a weight seen as a matrix, and its part of the sum.

    row, column: where it begins; rows, columns: its extent.
    """

    row: int
    column: int
    rows: int
    columns: int
    sum: int


# Of weights, by name, what one worker holds of them.
HeldPieces = dict[str, list[Piece]]


def fingerprint(tensor: Tensor) -> str:
    """16 hexadecimal digits that differ when a value of the tensor does, or its size.

    Args:
        tensor: of any shape and dtype; read where it is, at the speed of memory.
    """
    return joined([piece_of(tensor)])


def piece_of(tensor: Tensor, *, row: int = 0, column: int = 0) -> Piece:
    """The part that a piece has in its weight's sum.

    Args:
        tensor: the piece. One of three dimensions or more is seen as a matrix of its last one.
        row: row of the whole weight where the piece begins.
        column: its first column there; a vector is one row.
    """
    values = tensor.detach()
    columns = values.shape[-1] if values.ndim else 1
    matrix = values.reshape(-1, columns) if values.numel() else values.new_zeros(0, 1)
    rows, columns = matrix.shape
    per_word = WORD_BYTES // values.element_size()
    in_words = column % per_word == 0 and columns % per_word == 0
    weight_of_column = _column_factors(column, columns, per_word, in_words, values.device)
    weight_of_row = _factors(row + rows, ROWS, values.device)[row:]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    at_once = max(1, CHUNK_BYTES // max(1, columns * values.element_size()))
    for start in range(0, rows, at_once):
        chunk = _plain(matrix[start : start + at_once])
        bits = chunk.view(torch.int64) if in_words else _elements(chunk)
        # CUDA has no product of integers.
        on_cpu = bits.device.type == "cpu"
        sums = bits @ weight_of_column if on_cpu else (bits * weight_of_column).sum(1)
        total += (sums * weight_of_row[start : start + at_once]).sum()
    return Piece(row, column, rows, columns, int(total))


def pieces_of(values: Tensor, whole: torch.Size, start: int) -> list[Piece]:
    """The parts of consecutive values of a weight, which may begin and end inside a row.

    Args:
        values: the values, in a row.
        whole: shape of the weight.
        start: how many values of it come before.
    """
    columns = whole[-1] if whole else 1
    rows = whole.numel() // max(1, columns)
    if rows <= 1:
        return [piece_of(values, column=start)]
    found: list[Piece] = []
    at = 0
    while at < len(values):
        row, column = divmod(start + at, columns)
        # To the end of the row; from the beginning of one, all whole rows at once.
        here = min(columns - column, len(values) - at)
        if column == 0 and here == columns:
            here = (len(values) - at) // columns * columns
        part = values[at : at + here].reshape(-1, min(here, columns))
        found.append(piece_of(part, row=row, column=column))
        at += here
    return found


def joined(pieces: Iterable[Piece]) -> str:
    """The fingerprint of the weight that pieces make up; a piece held twice counts once.

    Pieces that do not make up a weight, or disagree about a part of it, give a fingerprint that no
    weight has.
    """
    distinct = set(pieces)
    size = sum(piece.rows * piece.columns for piece in distinct)
    total = sum(piece.sum for piece in distinct) % 2**64
    return sha256(f"{size} {total}".encode()).hexdigest()[:16]


def joined_reports(reports: Iterable[HeldPieces]) -> dict[str, str]:
    """The fingerprint of each weight, by name, of which several workers hold pieces."""
    pieces: HeldPieces = {}
    for report in reports:
        for name, held in report.items():
            pieces.setdefault(name, []).extend(held)
    return {name: joined(held) for name, held in pieces.items()}


def _plain(values: Tensor) -> Tensor:
    """A contiguous copy with one kind of zero."""
    if not values.is_floating_point():
        return values.contiguous().clone()
    # Kernels on float16 compute in float32, where its denormal numbers are none.
    smallest = 0.0 if values.dtype == torch.float16 else torch.finfo(values.dtype).tiny
    return hardshrink(values.contiguous(), smallest)


def _elements(values: Tensor) -> Tensor:
    """Each value's bits, as a number that is not negative unless it takes the whole word."""
    size = values.element_size()
    signed = values.view(SIGNED[size]).to(torch.int64)
    return signed if size == WORD_BYTES else signed & (2 ** (8 * size) - 1)


def _column_factors(
    start: int, count: int, per_word: int, in_words: bool, device: torch.device
) -> Tensor:
    """B: a random number per word of the row, times a value's place in its word.

    So words can be read whole: a word is the sum of its values times their places.
    """
    end = start + count
    words = _factors(-(-end // per_word), COLUMNS, device)
    if in_words:
        return words[start // per_word :]
    index = torch.arange(start, end, device=device)
    bits = 8 * WORD_BYTES // per_word
    place = torch.ones_like(index) << (index % per_word * bits)
    return words[index // per_word] * place


def _factors(count: int, salt: int, device: torch.device) -> Tensor:
    return _factor_table(max(1, count - 1).bit_length(), salt, device)[:count]


@cache
def _factor_table(bits: int, salt: int, device: torch.device) -> Tensor:
    """2**bits odd random numbers."""
    index = torch.arange(2**bits, dtype=torch.int64, device=device)
    return _mixed(index * 2 + 1 + (salt << 40)) | 1


def _mixed(numbers: Tensor) -> Tensor:
    """splitmix64 of each number. Source: Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195."""
    mixed = numbers + -0x61C8864680B583EB
    mixed = (mixed ^ _shifted(mixed, 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ _shifted(mixed, 27)) * -0x6B2FB644ECCEEE15
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Shifted right, with zeros from the left."""
    return (numbers >> by) & (2 ** (64 - by) - 1)
