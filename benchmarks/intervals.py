"""Medians and how sure they are: the machines that measure here do other work as well."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 20_000
# [median, lower end, upper end] of a 95 % bootstrap interval.
Interval = list[float]


def median(values: Sequence[float]) -> Interval:
    """Of measurements of one thing.

    Args:
        values: at least one.
    """
    found = np.asarray(values, dtype=float)
    picks = np.random.default_rng(0).integers(0, len(found), (DRAWS, len(found)))
    low, high = np.quantile(np.median(found[picks], axis=1), [0.025, 0.975])
    return [rounded(value) for value in (float(np.median(found)), float(low), float(high))]


def ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Of what was measured in turns: the median over pairs of one by the other.

    Args:
        above, below: measurements that belong together have the same place.
    """
    pairs = [one / other for one, other in zip(above, below, strict=True)]
    return median(pairs)


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Of what was measured in turns, where one turn is not the same work as another.

    Args:
        above, below: measurements of all the work, in turns.
    """
    one = np.asarray(above, dtype=float)
    other = np.asarray(below, dtype=float)
    picks = np.random.default_rng(0).integers(0, len(one), (DRAWS, len(one)))
    drawn = one[picks].sum(axis=1) / other[picks].sum(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return [rounded(float(value)) for value in (one.sum() / other.sum(), low, high)]


def rounded(value: float) -> float:
    """To four digits, which is more than any of them is worth."""
    return float(f"{value:.4g}")
