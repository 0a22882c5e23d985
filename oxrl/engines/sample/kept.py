"""Kept sets: the tokens that a cut distribution was sampled from, noted with every token.

With `rollout.top_k`, `top_p` or `min_p` the policy is what the sampler draws from: the softmax over
the tokens that are kept. Training needs them, since other weights would keep others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.engines.sample.rows import Recorded, Recording, Slots
from oxrl.tables.columns import KEPT, KEPT_IDS
from oxrl.types import Ragged


def kept_ids(slots: Slots, rows: slice, logits: Tensor) -> Ragged:
    """Return the ids that tokens are drawn from, ascending; none where nothing is cut.

    Args:
        slots: that are sampled.
        rows: which of them.
        logits: [m, V], minus infinity where a token is left out.

    Returns:
        m rows, int32.
    """
    cut = slots.top_k[rows] > 0
    cut |= slots.top_p[rows] < 1
    cut |= slots.min_p[rows] > 0
    kept = (logits > -torch.inf) & cut[:, None]
    counts = kept.sum(1).cpu()
    return Ragged(
        values=kept.nonzero()[:, 1].to(torch.int32),
        row_offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
    )


KEPT_SETS: Recorded = {KEPT: Recording(KEPT_IDS, kept_ids)}
