"""How a batch is cut for the model: which rank reads which rows, micro-batches by token budget, and
back together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from oxrl.engines.train.ranks import Ranks
from oxrl.types import Output, TokenBatch, TrainBatch

# (unit indices [n] int64, length of the longest row)
MicroBatch = tuple[Tensor, int]


def micro_batches(batch: TrainBatch, *, budget: int, ranks: int = 1) -> list[list[MicroBatch]]:
    """Micro-batches of every rank: longest units first, at most `budget` tokens each, padding
    included.

    Units (rows, or pairs of rows) are sorted by length and dealt out one by one, so every rank gets
    every length; a unit is in exactly one micro-batch of one rank. The result depends on the batch
    alone, so that each rank can compute everybody's share, and a rank with fewer micro-batches than
    another knows how many it has to sit out.
    """
    units = len(batch)
    if units == 0:
        return [[] for _ in range(ranks)]
    rows_per_unit = len(batch.inputs) // units
    lengths = batch.inputs.attention_mask.sum(1).view(units, rows_per_unit).amax(1).clamp(min=1)
    ordered, order = lengths.cpu().sort(descending=True, stable=True)
    return [
        _cut(order[rank::ranks], ordered[rank::ranks].tolist(), rows_per_unit, budget)
        for rank in range(ranks)
    ]


def _cut(units: Tensor, lengths: list[int], rows_per_unit: int, budget: int) -> list[MicroBatch]:
    cut: list[MicroBatch] = []
    start = 0
    while start < len(lengths):
        count = max(1, budget // (lengths[start] * rows_per_unit))
        cut.append((units[start : start + count], lengths[start]))
        start += count
    return cut


def own_share(
    batch: TrainBatch, *, budget: int, ranks: Ranks, device: torch.device
) -> Iterator[tuple[Tensor, TrainBatch]]:
    """(unit indices, that part of the batch on `device`) of each micro-batch of this rank.

    Every rank gets as many, so that all call collectives alike: one that has fewer sits the last
    ones out, without units, on two tokens of nobody's data, none of them trained.
    """
    shares = micro_batches(batch, budget=budget, ranks=ranks.world)
    mine = shares[ranks.rank]
    for units, length in mine:
        yield units, batch.select(units, length).to(device)
    nothing = torch.zeros(1, 2, dtype=torch.int64, device=device)
    padding = TokenBatch(tokens=nothing, attention_mask=nothing == 0, response_mask=nothing != 0)
    for _ in range(max(map(len, shares)) - len(mine)):
        yield torch.zeros(0, dtype=torch.int64), padding


class Merged:
    """Puts the outputs of micro-batches back into the row order and the length of the whole batch,
    on the CPU.
    """

    def __init__(self, inputs: TokenBatch) -> None:
        self._shape = inputs.tokens.shape
        self._fields: dict[str, Tensor] = {}

    def add(self, rows: Tensor, output: Output) -> None:
        """Place `output` at `rows` of the batch; without rows (padding) it only tells which fields
        there are.
        """
        for name, value in vars(output).items():
            if value is None:
                continue
            value = value.detach().cpu()
            if name not in self._fields:
                whole = self._shape[:1] if value.ndim == 1 else (*self._shape, *value.shape[2:])
                self._fields[name] = value.new_zeros(whole)
            field = self._fields[name]
            if value.ndim == 1:
                field[rows] = value[: len(rows)]
            else:
                field[rows, : value.shape[1]] = value[: len(rows)]

    def output(self, ranks: Ranks) -> Output:
        """The whole batch, on every rank: each row is zero everywhere but on the rank that had
        it.
        """
        return Output(**{name: ranks.sum(field) for name, field in self._fields.items()})
