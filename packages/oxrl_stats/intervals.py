"""95 % intervals of what an evaluation measures, over prompts.

The samples of one prompt are no independent trials: a prompt that is easy is easy in all of them.
So a prompt counts as one observation, the mean of its samples, and whoever takes more samples of
the same prompts is not surer than the prompts allow (Miller, arXiv:2411.00640, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Numbers = NDArray[np.float64]
# Of all intervals.
LEVEL = 0.95
# Under this many prompts there is no interval: Student's t of so few says little of anything.
FEWEST = 5
# Under this many the interval of a graded reward is rough.
ROUGH = 30
# Resamples of the prompts of which a bootstrap is made.
DRAWS = 2_000
# Resamples in memory at once: of 1,000 prompts 4 MB.
AT_ONCE = 500


@dataclass(frozen=True)
class Interval:
    """Something measured, and between which two numbers it likely is; NaN where nothing can be
    said.
    """

    value: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """As in `0.847 [0.824, 0.868]`."""
        if math.isnan(self.low):
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def student(prompts: int) -> float:
    """Student's t: so many standard errors an interval reaches to each side.

    Args:
        prompts: of which the standard error was estimated, 2 or more.
    """
    return float(stdtrit(prompts - 1, (1 + LEVEL) / 2))


def wilson_bounds(
    mean: Numbers, variance: Numbers, *, prompts: int, samples: int, reach: float
) -> tuple[Numbers, Numbers]:
    """Wilson's interval on the effective number of samples: of rewards that are 0 or 1.

    How many independent samples would be as sure as these are? `mean (1 - mean) / variance`: as
    many as there are where prompts do not differ, as few as there are prompts where each is always
    right or always wrong.

    Args:
        mean: [...] mean reward.
        variance: [...] of that mean, estimated over prompts.
        prompts, samples: how many prompts, and samples of each.
        reach: quantile of the distribution of the mean: Student's t, or 1.96 for Wilson's own.

    Returns:
        Lower and upper ends, [...].

    Source:
        Wilson 1927; the effective number of samples is that of Kish 1965, section 8.2 (design
        effect).
    """
    most = prompts * samples
    spread = mean * (1 - mean)
    # Where no prompt differs from another, nothing speaks against counting all samples.
    effective = np.divide(spread, variance, out=np.full_like(mean, most), where=variance > 0)
    effective = np.clip(effective, prompts, most)
    share = reach**2 / effective
    centre = (mean + share / 2) / (1 + share)
    half = np.sqrt(spread * share + share**2 / 4) / (1 + share)
    return centre - half, centre + half


def mean_bounds(rewards: Numbers, *, reach: float | None = None) -> tuple[Numbers, Numbers]:
    """The interval of the mean reward.

    Wilson's on the effective number of samples where all rewards are 0 or 1, else Student's t over
    prompts.

    Args:
        rewards: [..., prompts, samples], 5 prompts or more.
        reach: in place of Student's t.

    Returns:
        Lower and upper ends, [...].
    """
    *_, prompts, samples = rewards.shape
    if reach is None:
        reach = student(prompts)
    of_prompts = rewards.mean(-1)
    mean = of_prompts.mean(-1)
    variance = of_prompts.var(-1, ddof=1) / prompts
    if is_binary(rewards):
        return wilson_bounds(mean, variance, prompts=prompts, samples=samples, reach=reach)
    half = reach * np.sqrt(variance)
    return mean - half, mean + half


def all_scored(rewards: Numbers) -> NDArray[np.bool_]:
    """The prompts whose responses all have a reward.

    Args:
        rewards: [prompts, samples], NaN where there is none.

    Returns:
        [prompts], True for those.
    """
    return np.logical_not(np.isnan(rewards).any(axis=1))


def is_binary(rewards: Numbers) -> bool:
    """True if every reward is 0 or 1.

    Args:
        rewards: of any shape.
    """
    return bool(np.isin(rewards, (0.0, 1.0)).all())


def mean_interval(rewards: Numbers) -> Interval:
    """The mean reward of an evaluation.

    Args:
        rewards: [prompts, samples], each with a reward.

    Returns:
        NaN ends where there are fewer than 5 prompts.
    """
    if not rewards.size:
        return Interval(math.nan, math.nan, math.nan)
    mean = float(rewards.mean())
    if len(rewards) < FEWEST:
        return Interval(mean, math.nan, math.nan)
    low, high = mean_bounds(rewards)
    return Interval(mean, float(low), float(high))


def reward_bounds(rewards: Numbers) -> Mapping[str, float]:
    """The interval of the mean reward: what every evaluation of a run records.

    Args:
        rewards: [prompts, samples], of prompts whose responses all have a score.

    Returns:
        `eval/reward_low` and `eval/reward_high`; NaN where there are fewer than 5 prompts.
    """
    found = mean_interval(rewards)
    return {"eval/reward_low": found.low, "eval/reward_high": found.high}


def bootstrap_intervals(of_prompts: Numbers, *, seed: int = 0) -> list[Interval]:
    """Means over prompts, by a bootstrap over them: of pass@k and whatever else is no plain mean of
    samples.

    Args:
        of_prompts: [prompts, quantities], what each prompt says of each quantity.
        seed: of the resamples; the same for every evaluation.

    Returns:
        An interval per quantity, with NaN ends where there are fewer than 5 prompts.

    Source:
        Efron 1979: percentiles of 2,000 resamples.
    """
    prompts = len(of_prompts)
    means = of_prompts.mean(0)
    if prompts < FEWEST:
        return [Interval(float(mean), math.nan, math.nan) for mean in means]
    random = np.random.default_rng(seed)
    equal = np.full(prompts, 1 / prompts)
    drawn: list[Numbers] = []
    for start in range(0, DRAWS, AT_ONCE):
        # How often each prompt is in a resample: all quantities of it are one product.
        times = random.multinomial(prompts, equal, min(AT_ONCE, DRAWS - start))
        drawn.append(times @ of_prompts / prompts)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(drawn), (tail, 1 - tail), axis=0)
    return [Interval(*map(float, ends)) for ends in zip(means, low, high, strict=True)]


class Spread(NamedTuple):
    """The uncertainty of a mean by where it comes from, as parts of its variance.

    between: from the prompts, of which others could have been taken. within: from the samples of
        each.
    """

    between: float
    within: float


def spread(rewards: Numbers) -> Spread:
    """The parts of the variance of the mean that are due to prompts and to samples.

    Args:
        rewards: [prompts, samples], 2 prompts or more.

    Returns:
        Of one sample per prompt all counts as between prompts: the two cannot be told apart.

    Source:
        One-way analysis of variance: `between / prompts + within / (prompts * samples)`.
    """
    prompts, samples = rewards.shape
    total = float(rewards.mean(1).var(ddof=1)) / prompts
    if samples == 1:
        return Spread(total, 0.0)
    within = float(rewards.var(1, ddof=1).mean()) / (prompts * samples)
    return Spread(max(total - within, 0.0), min(within, total))


def advice(rewards: Numbers) -> str:
    """One sentence: what would make the interval of the mean narrower.

    Args:
        rewards: [prompts, samples].
    """
    prompts, samples = rewards.shape
    if prompts < FEWEST:
        return f"{prompts} prompts are too few for an interval: take {FEWEST} or more"
    reach = student(prompts)
    parts = spread(rewards)
    now = _points(reach, parts.between + parts.within)
    rough = "" if prompts >= ROUGH or is_binary(rewards) else f" ({prompts} prompts: rough)"
    if parts.between + parts.within == 0:
        return "all prompts say the same: only other prompts could say more"
    if samples == 1:
        told = "take more prompts, or 2 samples of each, which tell what more of them would do"
    elif parts.between > parts.within:
        floor = _points(reach, parts.between)
        told = f"more samples cannot bring it under {floor}: take more prompts"
    else:
        halved = _points(reach, parts.between + parts.within / 2)
        told = f"{2 * samples} samples of each prompt would make it {halved}"
    return f"{now}{rough}; {told}"


def _points(reach: float, variance: float) -> str:
    return f"±{100 * reach * math.sqrt(variance):.1f} points"
