"""Which row comes when: a pure function of seed and position, so nothing about it is saved or
restored.
"""

from __future__ import annotations

import functools
import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from oxrl.seeds import stable_seed

log = logging.getLogger(__name__)
Unit = TypeVar("Unit", covariant=True)


def index_at(draw: int, size: int, seed: int) -> int:
    """Row, of `size`, at global position `draw` (from 0, over all epochs) of an endless shuffled
    pass.

    Every epoch visits each row once, in a fresh order that depends only on (seed, epoch).
    """
    if draw < 0 or size < 1:
        raise ValueError(f"index_at needs draw >= 0 and size >= 1, got draw={draw}, size={size}")
    epoch, position = divmod(draw, size)
    return int(_permutation(epoch, size, seed)[position])


@functools.lru_cache(
    maxsize=64
)  # every source of a mixture is in the middle of an epoch of its own
def _permutation(epoch: int, size: int, seed: int) -> np.ndarray:
    # Raw bits of a bit generator are frozen across numpy versions; Generator.permutation is not.
    keys = np.random.PCG64(stable_seed("order", seed, epoch)).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.min_scalar_type(size))


class Rows(Protocol[Unit]):
    def __len__(self) -> int: ...
    def at(self, draw: int, *, seed: int) -> Unit: ...


def open_rows(
    train: str | Mapping[str, float], load: Callable[[str], Rows[Unit]], *, per_step: int = 1
) -> Rows[Unit]:
    """`data.train`: one file, or several with the share of each; warns where a step of `per_step`
    must repeat rows.
    """
    one = isinstance(train, str)
    rows = load(train) if one else Mixture([load(path) for path in train], list(train.values()))
    if len(rows) < per_step:
        log.warning(
            "%s: only %d rows for steps of %d: a step learns some of them again",
            train,
            len(rows),
            per_step,
        )
    return rows


class Mixture(Generic[Unit]):
    """Sources drawn from in `ratios` (positive, scaled to sum 1).

    Draw by draw the source furthest behind its share is next, the first one on a tie. After n draws
    a source has been drawn within one draw of ratio * n times for two sources (within the number of
    sources for more), and exactly that often whenever ratio * n is whole for all. Each source keeps
    its own shuffled epochs.
    """

    def __init__(self, sources: Sequence[Rows[Unit]], ratios: Sequence[float]) -> None:
        if len(sources) != len(ratios) or not sources or not all(0 < r < math.inf for r in ratios):
            raise ValueError(
                f"{len(sources)} sources need as many positive ratios, got {list(ratios)}"
            )
        self._sources = list(sources)
        self._ratios = [ratio / math.fsum(ratios) for ratio in ratios]
        self._counts = [0] * len(sources)
        self._located = array("q")  # own draw * sources + source, 8 bytes for each draw so far

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)

    def locate(self, draw: int) -> tuple[int, int]:
        """(source, its own draw) of global position `draw`; the positions before it are computed
        once and kept.
        """
        for number in range(len(self._located) + 1, draw + 2):
            # Rounded: 0.7 * 10 and 7 must tie, whatever the last bit says.
            behind = [
                round(ratio * number - count, 9)
                for ratio, count in zip(self._ratios, self._counts, strict=True)
            ]
            source = behind.index(max(behind))
            self._located.append(self._counts[source] * len(self._sources) + source)
            self._counts[source] += 1
        own, source = divmod(self._located[draw], len(self._sources))
        return source, own

    def at(self, draw: int, *, seed: int) -> Unit:
        """The unit at `draw` of the endless mixed order of `seed`; each source has an order of its
        own.
        """
        source, own = self.locate(draw)
        return self._sources[source].at(own, seed=stable_seed("mixture", seed, source))
