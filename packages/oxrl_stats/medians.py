"""Medians and how sure they are: of what is measured in turns on a machine that does other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from oxrl_stats.intervals import LEVEL, Numbers

# Resamples: measurements are few, and their medians jump.
DRAWS = 20_000
# [value, lower end, upper end].
Measured = list[float]


def median(values: Sequence[float]) -> Measured:
    """The median of measurements of one thing, with its interval.

    Args:
        values: at least one; of a single one both ends are itself.

    Source:
        Efron 1979: percentiles of 20,000 resamples.
    """
    return _told(lambda drawn, axis: np.median(drawn, axis=axis), np.asarray(values, dtype=float))


def ratio(above: Sequence[float], below: Sequence[float]) -> Measured:
    """The median over turns of one measurement by the other.

    Args:
        above, below: of the same turn at the same place.
    """
    return median([one / other for one, other in zip(above, below, strict=True)])


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Measured:
    """All of one by all of the other, where one turn is not the same work as another.

    Args:
        above, below: of the same turn at the same place.
    """
    pairs = np.array(list(zip(above, below, strict=True)), dtype=float)

    def share(one: Numbers, other: Numbers, axis: int) -> Numbers:
        return one.sum(axis) / other.sum(axis)

    return _told(share, *pairs.T)


def rounded(value: float) -> float:
    """To four digits, which is more than any measurement is worth.

    Args:
        value: measured.
    """
    return float(f"{value:.4g}")


def _told(statistic: Callable[..., Numbers], *columns: Numbers) -> Measured:
    value = float(statistic(*columns, axis=0))
    if len(columns[0]) == 1:  # nothing to draw from
        return [rounded(value)] * 3
    ends = stats.bootstrap(
        columns,
        statistic,
        paired=len(columns) > 1,
        vectorized=True,
        n_resamples=DRAWS,
        batch=500,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return [rounded(number) for number in (value, float(ends.low), float(ends.high))]
