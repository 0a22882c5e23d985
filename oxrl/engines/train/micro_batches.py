"""The cuts of a batch for the model: by rank, and by token budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.models.shared_prefix import Group, cheapest_cut, groups_of
from oxrl.runs.device import home_of_float64
from oxrl.runs.ranks import Ranks
from oxrl.tables.vision import PATCHES
from oxrl.types import TokenBatch, TrainBatch

# What a micro-batch costs beside its tokens, in tokens: on a CPU 217, 64 and 62 with models of
# 0.15M, 3.3M and 25M parameters. Not measured on a GPU, where it is much more.
PRICES = {"cpu": 128, "cuda": 2048}


class MicroBatch(NamedTuple):
    """A micro-batch of one rank.

    units: int64 indices of rows or pairs, [n]; length: tokens of the longest row.
    """

    units: Tensor
    length: int


# Indices of rows, or how many tokens each row has.
Groups = list[Group]
# One after the other, on one rank.
MicroBatches = list[MicroBatch]


def micro_batches(
    batch: TrainBatch, *, budget: int, ranks: int = 1, price: int | None = None
) -> list[MicroBatches]:
    """Micro-batches of every rank: longest units first, at most `budget` tokens each.

    Units (rows, or pairs of rows) are sorted by length and dealt out one by one, so every rank gets
    every length; a unit is in exactly one micro-batch of one rank. The result depends on the batch
    alone, so that each rank can compute everybody's share, and a rank with fewer micro-batches than
    another knows how many it has to sit out.

    Args:
        batch: what is cut.
        budget: tokens, padding included, and patches of images; a unit that has more goes alone.
        ranks: how many share the batch.
        price: of a micro-batch, in tokens, of one process: where padding costs more, there are more
            of them. None: each is filled.

    Returns:
        The micro-batches of each rank, in the order in which it reads them.
    """
    units = len(batch)
    if units == 0:
        return [[] for _ in range(ranks)]
    rows_per_unit = len(batch.inputs) // units
    row_lengths = batch.inputs.attention_mask.sum(1)
    unit_lengths = row_lengths.view(units, rows_per_unit).amax(1).clamp(min=1)
    lengths, order = unit_lengths.cpu().sort(descending=True, stable=True)
    budget_per_row = budget // rows_per_unit
    patches = torch.zeros_like(order)
    if PATCHES in batch.inputs.extras:
        per_unit = patch_counts(batch.inputs).view(units, rows_per_unit).sum(1)
        patches = -(-per_unit // rows_per_unit)
        price = None
    cuts: list[MicroBatches] = []
    for rank in range(ranks):
        own = order[rank::ranks]
        tokens = lengths[rank::ranks].tolist()
        if ranks == 1 and price is not None:
            each = max(1, price // rows_per_unit)
            counts = cheapest_cut(tokens, most=budget_per_row, price=each)
        else:
            counts = _counts(tokens, patches[own].tolist(), budget_per_row)
        cuts.append(_pieces(own, tokens, counts))
    return cuts


def patch_counts(inputs: TokenBatch) -> Tensor:
    """Count the patches of the images of each row, [B] int64."""
    patches = inputs.extras[PATCHES]
    totals = patches.values.new_zeros(len(patches.values) + 1)
    totals[1:] = patches.values.cumsum(0)
    return totals[patches.row_offsets].diff().cpu()


def _pieces(units: Tensor, lengths: list[int], counts: list[int]) -> MicroBatches:
    cut: MicroBatches = []
    start = 0
    for count in counts:
        cut.append(MicroBatch(units[start : start + count], lengths[start]))
        start += count
    return cut


def _counts(lengths: list[int], patches: list[int], budget: int) -> list[int]:
    """Fill each micro-batch; return how many units it has: a vision tower reads patches, too.

    Args:
        lengths: of the units' longest rows, in tokens, longest first.
        patches: of each unit, per row of it.
        budget: tokens and patches of a micro-batch, per row of a unit.
    """
    counts: list[int] = []
    start = 0
    seen = 0
    for at, count in enumerate(patches):
        seen += count
        padded = lengths[start] * (at + 1 - start)
        if at > start and padded + seen > budget:
            counts.append(at - start)
            start = at
            seen = count
    if lengths:
        counts.append(len(lengths) - start)
    return counts


def group_micro_batches(
    batch: TrainBatch, *, budget: int, ranks: int = 1, price: int | None = None
) -> list[MicroBatches]:
    """As `micro_batches`, with the rows of a prompt side by side as far as they fit.

    Args:
        batch: what is cut; the two rows of a pair are side by side anyway.
        budget: tokens that the model reads: a prompt once, and its responses.
        ranks: how many share the batch.
        price: of a micro-batch where rows have nothing in common.
    """
    groups = groups_of(batch.inputs)
    if len(groups) == len(batch.inputs):  # nothing in common
        return micro_batches(batch, budget=budget, ranks=ranks, price=price)
    lengths: list[int] = batch.inputs.attention_mask.sum(1).tolist()
    if len(batch) < len(batch.inputs):
        pieces = _units(groups, lengths, len(batch))
        lengths = torch.tensor(lengths).view(len(batch), -1).amax(1).tolist()
    else:
        pieces = [piece for group in groups for piece in _fitting(group, lengths, budget)]
    pieces.sort(key=lambda piece: piece.tokens, reverse=True)
    cuts: list[MicroBatches] = []
    for rank in range(ranks):
        filled = _filled(pieces[rank::ranks], budget)
        cuts.append([_micro_batch(piece.rows, lengths) for piece in filled])
    return cuts


def _units(groups: Groups, lengths: list[int], count: int) -> Groups:
    """Return each of `count` units, pairs of rows, with the tokens that it has where a prompt that
    its rows have in common is there once.

    Args:
        groups: of all rows.
        lengths: of every row.
    """
    per_unit = len(lengths) // count
    tokens = [sum(lengths[unit * per_unit : (unit + 1) * per_unit]) for unit in range(count)]
    for group in groups:
        seen: set[int] = set()
        for row in group.rows:
            unit = row // per_unit
            if unit in seen:
                tokens[unit] -= group.prompt
            seen.add(unit)
    return [Group([unit], 0, own) for unit, own in enumerate(tokens)]


def _fitting(group: Group, lengths: list[int], budget: int) -> Groups:
    """Cut a group into pieces of at most `budget` tokens, each with the prompt; longest first."""
    prompt = group.prompt
    rows = sorted(group.rows, key=lambda row: -lengths[row])
    single = [Group([row], prompt, lengths[row] - prompt) for row in rows]
    filled = _filled(single, budget - prompt)
    return [Group(piece.rows, prompt, prompt + piece.tokens) for piece in filled]


def _filled(pieces: Groups, budget: int) -> Groups:
    """Join pieces, one after the other, as long as they have at most `budget` tokens together."""
    joined: Groups = []
    for piece in pieces:
        if joined and joined[-1].tokens + piece.tokens <= budget:
            rows, prompt, tokens = joined[-1]
            joined[-1] = Group(rows + piece.rows, prompt, tokens + piece.tokens)
        else:
            joined.append(piece)
    return joined


def _micro_batch(rows: list[int], lengths: list[int]) -> MicroBatch:
    longest = max(lengths[row] for row in rows)
    return MicroBatch(torch.tensor(rows, dtype=torch.int64), longest)


class Share(NamedTuple):
    """A part of a batch that one rank works on.

    rows: indices of its rows in `batch.inputs`, int64. part: these rows. read: what the model is
    given, these rows first: there may be one more, for company.
    """

    rows: Tensor
    part: TrainBatch
    read: TokenBatch


def own_share(
    batch: TrainBatch, shares: list[MicroBatches], *, ranks: Ranks, device: torch.device
) -> Iterator[Share]:
    """Yield the parts of the batch that this rank reads.

    Every rank gets as many micro-batches, so that all call collectives alike: one that has fewer
    sits the last ones out, without rows, on two tokens of nobody's data, none of them trained. If
    the batch has no rows, all get one such, which tells what there would be.

    A vision tower is run where there are images, and ranks have to run it alike. So where one rank
    has some, the others read a row with images beside their own, of which nothing is trained.

    Args:
        batch: the whole batch, the same on every rank.
        shares: the micro-batches of each rank.
        ranks: this process's place.
        device: where the model reads its rows; a part is where float64 is, which losses compute in.
    """
    rows_per_unit = len(batch.inputs) // max(1, len(batch))
    mine = shares[ranks.rank]
    dummies = None
    if ranks.world > 1 and len(batch) and PATCHES in batch.inputs.extras:
        from oxrl.engines.train.image_rows import DummyRows  # rows of text do without

        counts = patch_counts(batch.inputs).view(len(batch), rows_per_unit)
        units_read = [[units for units, _ in share] for share in shares]
        dummies = DummyRows(batch.inputs, counts, units_read)
    nothing = torch.zeros(1, 2, dtype=torch.int64)
    idle = TokenBatch(tokens=nothing, attention_mask=nothing == 0, response_mask=nothing != 0)
    home = home_of_float64(device)
    idle = idle.to(home)
    for turn in range(max(1, *(len(share) for share in shares))):
        rows = torch.zeros(0, dtype=torch.int64)
        part: TrainBatch = idle
        if turn < len(mine):
            units, length = mine[turn]
            rows = (units[:, None] * rows_per_unit + torch.arange(rows_per_unit)).flatten()
            part = batch.select(units, length).to(home)
        read = part.inputs.to(device)
        if dummies is not None:
            read = dummies.beside(turn, rows, read)
        yield Share(rows, part, read)
