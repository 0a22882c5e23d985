"""The order of rows: a function of seed and position, so nothing of it is saved or restored."""

from __future__ import annotations

import functools
import logging
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from oxrl.seeds import stable_seed

log = logging.getLogger(__name__)
Unit = TypeVar("Unit", covariant=True)


class RowSource(Protocol[Unit]):
    """Rows in a seeded, shuffled, endless order; `draw` is the global position in it, from 0."""

    def __len__(self) -> int: ...
    def at(self, draw: int, *, seed: int) -> Unit:
        """Return the unit at a position of the order that a seed decides.

        Args:
            draw: from 0, without an end.
            seed: of the order.

        Returns:
            The same unit for the same draw and seed, whatever was drawn before.
        """
        ...


class Units(Protocol[Unit]):
    """So many units, in memory or made when they are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Unit: ...


class Shuffled(Generic[Unit]):
    """Units in file order, which are drawn in a seeded, endless order.

    Args:
        units: in file order.
    """

    def __init__(self, units: Units[Unit]) -> None:
        self._units = units

    def __len__(self) -> int:
        return len(self._units)

    def at(self, draw: int, *, seed: int) -> Unit:
        """Return the unit at global position `draw` of the shuffled, endless order of `seed`.

        Args:
            draw: from 0, without an end; every epoch has each unit once.
            seed: of the order.

        Raises:
            DataError: the file of streamed rows is no longer the one it was.
        """
        return self._units[index_at(draw, len(self), seed)]

    def in_order(self) -> list[Unit]:
        """Return every unit once, in file order."""
        return [self._units[index] for index in range(len(self))]

    def batches(self, size: int) -> Iterator[list[Unit]]:
        """Yield every unit once, in file order, at most `size` at a time.

        Args:
            size: at least 1; the last one may be shorter.

        Returns:
            Lists of units.
        """
        everything = range(len(self))
        for start in range(0, len(self), size):
            yield [self._units[index] for index in everything[start : start + size]]


def index_at(draw: int, size: int, seed: int) -> int:
    """Find the one of `size` rows that comes at a position of an endless shuffled pass.

    Every epoch visits each row once, in a fresh order that depends only on (seed, epoch).

    Args:
        draw: global position, from 0, over all epochs.
        size: rows of the file.
        seed: of the order.

    Returns:
        The index of the row, from 0.

    Raises:
        ValueError: there is no such position.
    """
    if draw < 0 or size < 1:
        raise ValueError(f"index_at needs draw >= 0 and size >= 1, got draw={draw}, size={size}")
    epoch, position = divmod(draw, size)
    return int(_permutation(epoch, size, seed)[position])


# Every source of a mixture is in the middle of an epoch of its own.
@functools.lru_cache(maxsize=64)
def _permutation(epoch: int, size: int, seed: int) -> np.ndarray:
    # Raw bits of a bit generator are frozen across numpy versions; Generator.permutation is not.
    keys = np.random.PCG64(stable_seed("order", seed, epoch)).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.min_scalar_type(size))


def open_rows(
    train: str | Mapping[str, float], load: Callable[[str], RowSource[Unit]], *, per_step: int = 1
) -> RowSource[Unit]:
    """Open what `data.train` names; warn where one step must repeat rows.

    Args:
        train: one file, or several with the share of each.
        load: opens one file.
        per_step: rows that a step draws.

    Returns:
        The rows of the file, or a mixture of several.
    """
    if isinstance(train, str):
        rows = load(train)
    else:
        rows = Mixture([load(path) for path in train], list(train.values()))
    size = len(rows)
    if size < per_step:
        told = "%s: %d rows for batches of %d: a batch repeats some of them"
        log.warning(told, train, size, per_step)
    return rows


def first_draws(
    train: str | Mapping[str, float], file: str, size: int, *, steps: int, per_step: int, seed: int
) -> Iterator[list[int]]:
    """Yield for each step the rows of a file of `data.train` that no earlier step drew.

    Args:
        train: `data.train`: one file, or file -> share of the draws.
        file: of `train`, of `size` rows.
        size: rows of the file.
        steps: of the run, each of which draws `per_step` rows.
        per_step: rows that a step draws, of all files together.
        seed: of the order.

    Returns:
        Per step the rows of the file that no step before it drew; ends with the last new row.
    """
    shares = Shares([1.0])
    source = 0
    own_seed = seed
    if not isinstance(train, str):
        shares = Shares(list(train.values()))
        source = list(train).index(file)
        own_seed = _source_seed(seed, source)
    seen: set[int] = set()
    for step in range(steps):
        if len(seen) == size:
            return
        new: list[int] = []
        for draw in range(step * per_step, (step + 1) * per_step):
            drawn, own = shares.locate(draw)
            if drawn != source:
                continue
            row = index_at(own, size, own_seed)
            if row not in seen:
                seen.add(row)
                new.append(row)
        yield new


class Shares:
    """The order in which sources with `ratios` (positive, scaled to sum 1) take turns.

    Draw by draw the source furthest behind its share is next, the first one on a tie. After n draws
    a source has been drawn within one draw of ratio * n times for two sources (within the number of
    sources for more), and exactly that often whenever ratio * n is whole for all.

    Args:
        ratios: one for each source.
    """

    def __init__(self, ratios: Sequence[float]) -> None:
        total = math.fsum(ratios)
        self._ratios = [ratio / total for ratio in ratios]
        self._counts = [0] * len(ratios)
        self._located = array("q")  # own draw * sources + source, 8 bytes for each draw so far

    def locate(self, draw: int) -> tuple[int, int]:
        """Find the source of a global position; positions before it are computed once and kept.

        Args:
            draw: the position, from 0.

        Returns:
            The index of the source, and the position in the source's own order.
        """
        sources = len(self._ratios)
        while len(self._located) <= draw:
            drawn = len(self._located) + 1
            # Rounded: 0.7 * 10 and 7 must tie, whatever the last bit says.
            behind = [
                round(ratio * drawn - count, 9)
                for ratio, count in zip(self._ratios, self._counts, strict=True)
            ]
            source = behind.index(max(behind))
            self._located.append(self._counts[source] * sources + source)
            self._counts[source] += 1
        own, source = divmod(self._located[draw], sources)
        return source, own


class Mixture(Shares, Generic[Unit]):
    """Sources drawn from in shares; each source keeps its own shuffled epochs.

    Args:
        sources: rows of one kind.
        ratios: the share of draws of each, in any scale.

    Raises:
        ValueError: not one positive ratio per source.
    """

    def __init__(self, sources: Sequence[RowSource[Unit]], ratios: Sequence[float]) -> None:
        count = len(sources)
        positive = all(0 < ratio < math.inf for ratio in ratios)
        if count == 0 or count != len(ratios) or not positive:
            raise ValueError(f"{count} sources need as many positive ratios, got {list(ratios)}")
        super().__init__(ratios)
        self._sources = list(sources)

    def __len__(self) -> int:
        return sum(map(len, self._sources))

    def at(self, draw: int, *, seed: int) -> Unit:
        """Return the unit at `draw` of the mixed order of `seed`; each source has its own order.

        Args:
            draw: the position, from 0, without an end.
            seed: of the order.
        """
        source, own = self.locate(draw)
        return self._sources[source].at(own, seed=_source_seed(seed, source))


def _source_seed(seed: int, source: int) -> int:
    """Return the seed of the order of one source of a mixture."""
    return stable_seed("mixture", seed, source)
