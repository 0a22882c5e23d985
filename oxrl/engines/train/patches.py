"""Patches of images in a batch, which take some of a micro-batch's budget."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from oxrl.types import Ragged


def patches_per_row(patches: Ragged, units: int) -> Tensor:
    """Count the patches of the images of each unit, per row of it, [units] int64.

    Args:
        patches: of every image.
        units: rows, or pairs of rows.
    """
    ends = patches.row_offsets.tolist()
    counts = [int(patches.values[start:end].sum()) for start, end in pairwise(ends)]
    per_unit = torch.tensor(counts).view(units, -1)
    return -(-per_unit.sum(1) // per_unit.shape[1])


def cut_by_patches(
    own: Tensor, lengths: list[int], patches: Ragged, units: int, budget: int
) -> list[int]:
    """Return the number of units in each micro-batch of a rank: a vision tower reads patches, too.

    Args:
        own: indices of the rank's units, int64, longest first.
        lengths: of their longest rows, in tokens.
        patches: of every image of the batch.
        units: of the whole batch.
        budget: tokens and patches of a micro-batch, per row of a unit.
    """
    per_unit = patches_per_row(patches, units)[own].tolist()
    cut: list[int] = []
    start = 0
    seen = 0
    for at, count in enumerate(per_unit):
        seen += count
        padded = lengths[start] * (at + 1 - start)
        if at > start and padded + seen > budget:
            cut.append(at - start)
            start = at
            seen = count
    if lengths:
        cut.append(len(lengths) - start)
    return cut
