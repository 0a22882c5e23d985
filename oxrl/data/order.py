"""Which row comes when: a pure function of the seed and the position, so nothing about it is saved or restored."""

from __future__ import annotations

import functools

import numpy as np

from oxrl.seeds import stable_seed


def index_at(draw: int, size: int, seed: int) -> int:
    """Row, of `size`, at global position `draw` (from 0, over all epochs) of an endless shuffled pass.

    Every epoch visits each row once, in a fresh order that depends only on (seed, epoch).
    """
    if draw < 0 or size < 1:
        raise ValueError(f"index_at needs draw >= 0 and size >= 1, got draw={draw}, size={size}")
    epoch, position = divmod(draw, size)
    return int(_permutation(epoch, size, seed)[position])


@functools.lru_cache(maxsize=8)
def _permutation(epoch: int, size: int, seed: int) -> np.ndarray:
    # Raw bits of a bit generator are frozen across numpy versions; Generator.permutation is not.
    keys = np.random.PCG64(stable_seed("order", seed, epoch)).random_raw(size)
    return np.argsort(keys, kind="stable")
