"""Two models on the same prompts: is the difference more than chance?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy import stats

from oxrl_stats.intervals import FEWEST, Interval, Numbers, student

# Up to so many prompts all sign flips are tried, with more of them so many are drawn.
MOST_TRIED = 12
FLIPS = 9_999
# Flips in memory at once.
AT_ONCE = 500
# Sums that differ by less, in shares of the observed one, are equal: rounding.
EQUAL = 1e-9


@dataclass(frozen=True)
class Chance:
    """The share of cases in which chance alone shows such a difference, or a larger one.

    p: counts equal differences whole, and is never too small. mid_p: counts them by half, closer to
        its level on average, and now and then above it.
    """

    p: float
    mid_p: float


def difference(of_prompts: Numbers) -> Interval:
    """The mean difference between two models, by Student's t over prompts.

    Args:
        of_prompts: [prompts], mean reward of one model minus that of the other.

    Returns:
        NaN ends where there are fewer than 5 prompts.
    """
    prompts = len(of_prompts)
    mean = float(of_prompts.mean())
    if prompts < FEWEST:
        return Interval(mean, math.nan, math.nan)
    half = student(prompts) * float(of_prompts.std(ddof=1)) / math.sqrt(prompts)
    return Interval(mean, mean - half, mean + half)


def sign_flips(of_prompts: Numbers, *, flips: int = FLIPS, seed: int = 0) -> Chance:
    """The two-sided permutation test of paired differences: were it chance, each could have had the
    other sign.

    Args:
        of_prompts: [prompts], mean reward of one model minus that of the other.
        flips: how many are drawn with more than 12 prompts; with fewer all are tried.
        seed: of those that are drawn.

    Source:
        Fisher 1935, section 21; flips that are drawn count the observed one among them (Phipson and
        Smyth, arXiv:1603.05766, equation 2).
    """
    observed = abs(float(of_prompts.sum()))
    rounding = EQUAL * observed
    above = 0
    equal = 0
    tried = 0
    for signs in _signs(len(of_prompts), flips, seed):
        sums = np.abs(signs @ of_prompts)
        as_large = int((sums >= observed - rounding).sum())
        larger = int((sums > observed + rounding).sum())
        above += larger
        equal += as_large - larger
        tried += len(signs)
    if len(of_prompts) > MOST_TRIED:  # the observed one is one more that is equal
        equal += 1
        tried += 1
    return Chance((above + equal) / tried, (above + equal / 2) / tried)


def _signs(prompts: int, flips: int, seed: int) -> Iterator[Numbers]:
    """Signs of all prompts, [at most 500, prompts] at a time."""
    if prompts <= MOST_TRIED:
        yield np.array(list(product((1.0, -1.0), repeat=prompts)), dtype=float)
        return
    random = np.random.default_rng(seed)
    for start in range(0, flips, AT_ONCE):
        count = min(AT_ONCE, flips - start)
        yield np.where(random.integers(0, 2, (count, prompts)), 1.0, -1.0)


def mcnemar(first: int, second: int) -> float:
    """McNemar's exact test: of the prompts that one model alone gets right, are as many of one as
    of the other?

    Args:
        first, second: prompts that one model alone gets right, and the other one alone.

    Source:
        McNemar 1947, as a two-sided binomial test of the discordant pairs.
    """
    pairs = first + second
    return float(stats.binomtest(first, pairs).pvalue) if pairs else 1.0


def holm(values: Sequence[float]) -> list[float]:
    """p-values of several tests, adjusted so that one of them is wrongly below 5 % in at most 5 %
    of cases.

    Args:
        values: of tests, in any order; the adjusted ones have theirs.

    Source:
        Holm 1979.
    """
    adjusted = [0.0] * len(values)
    largest = 0.0
    for rank, place in enumerate(np.argsort(values, kind="stable")):
        value = values[place] * (len(values) - rank)
        largest = min(max(largest, value), 1.0)
        adjusted[place] = largest
    return adjusted
