"""Intervals of evaluations: how often they hold what is true, by simulation, and known cases."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from oxrl_stats.intervals import (
    Interval,
    advice,
    bootstrap_intervals,
    mean_bounds,
    mean_interval,
    spread,
    student,
    wilson_bounds,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"
DRAWS = 10_000
# Success rates of prompts: what models look like, and the awkward ends.
RATES = {
    "uniform": (1.0, 1.0),
    "Beta(.5, .5)": (0.5, 0.5),
    "Beta(.1, .1)": (0.1, 0.1),
    "Beta(.1, .9)": (0.1, 0.9),
}

# Columns of the page.
PROMPTS = [30, 100, 300]


def coverage(rates: str, prompts: int, samples: int) -> float:
    """How many of the intervals hold the true mean, in percent."""
    one, other = RATES[rates]
    random = np.random.default_rng(0)
    chances = random.beta(one, other, (DRAWS, prompts))
    of_prompts = random.binomial(samples, chances) / samples
    low, high = wilson_bounds(
        of_prompts.mean(1),
        of_prompts.var(1, ddof=1) / prompts,
        prompts=prompts,
        samples=samples,
        reach=student(prompts),
    )
    true = one / (one + other)
    return 100 * float(((low <= true) & (true <= high)).mean())


def told(rates: str, prompts: int, samples: int) -> str:
    """What docs/evaluation.md says of it."""
    [row] = re.findall(rf"^\| {re.escape(rates)} \| {samples} \|(.*)\|$", PAGE.read_text(), re.M)
    return row.split("|")[PROMPTS.index(prompts)].strip()


@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("rates", RATES)
def test_intervals_of_right_and_wrong_hold_the_truth_in_95_of_100_cases(
    rates: str, prompts: int, samples: int
) -> None:
    found = coverage(rates, prompts, samples)
    assert told(rates, prompts, samples) == f"{found:.1f}"
    if prompts == 30:
        # Of 400,000 draws 92.9 in the hardest cell, Beta(.1, .9) with 16 samples; of these 93.0.
        assert 92.5 <= found <= 98
    elif samples == 1:
        assert 93 <= found <= 96.5
    else:
        assert 94 <= found <= 96


@pytest.mark.parametrize(("right", "prompts"), [(0, 10), (3, 10), (50, 100), (299, 300), (7, 7)])
def test_one_sample_of_each_prompt_is_wilsons_own_interval(right: int, prompts: int) -> None:
    rewards = np.zeros((prompts, 1))
    rewards[:right] = 1.0
    known = stats.binomtest(right, prompts).proportion_ci(method="wilson")
    low, high = mean_bounds(rewards, reach=float(stats.norm.ppf(0.975)))
    assert float(low) == pytest.approx(known.low, abs=1e-12)
    assert float(high) == pytest.approx(known.high, abs=1e-12)


def test_samples_that_agree_within_a_prompt_make_nobody_surer() -> None:
    once = np.array([[1.0], [0.0], [1.0], [1.0], [0.0], [1.0], [0.0], [1.0]])
    [one, many] = [mean_interval(np.repeat(once, samples, axis=1)) for samples in (1, 16)]
    assert many == one
    # Samples that differ within every prompt alike are as good as trials of their own.
    alike = np.tile([1.0, 0.0], (8, 8))
    trials = stats.binomtest(64, 128).proportion_ci(method="wilson")
    found = mean_interval(alike)
    assert found.value == 0.5
    assert trials.low - 0.02 < found.low < trials.low < 0.5 < trials.high < found.high


def test_graded_rewards_have_students_interval_over_prompts() -> None:
    rewards = np.random.default_rng(3).random((12, 3)) * 5
    of_prompts = rewards.mean(1)
    known = stats.t.interval(0.95, 11, of_prompts.mean(), stats.sem(of_prompts))
    found = mean_interval(rewards)
    assert (found.low, found.high) == pytest.approx(known, abs=1e-12)
    assert found.value == pytest.approx(rewards.mean(), abs=1e-12)


@pytest.mark.parametrize("prompts", [1, 4])
def test_fewer_than_five_prompts_have_no_interval(prompts: int) -> None:
    found = mean_interval(np.ones((prompts, 3)))
    assert found.value == 1.0 and math.isnan(found.low) and math.isnan(found.high)
    [other] = bootstrap_intervals(np.ones((prompts, 1)))
    assert other.value == 1.0 and math.isnan(other.low) and found.text == "1.000"
    assert math.isnan(mean_interval(np.ones((0, 3))).value)
    assert "too few for an interval: take 5 or more" in advice(np.ones((prompts, 3)))


def test_a_bootstrap_is_one_over_prompts_and_the_same_every_time() -> None:
    values = np.random.default_rng(5).beta(0.5, 0.5, (200, 2))
    found = bootstrap_intervals(values)
    for column, interval in enumerate(found):
        known = stats.bootstrap(
            (values[:, column],),
            np.mean,
            n_resamples=20_000,
            method="percentile",
            rng=np.random.default_rng(1),
        ).confidence_interval
        assert interval.value == pytest.approx(values[:, column].mean(), abs=1e-12)
        # Ends of 2,000 resamples lie within a twentieth of the width of those of many.
        assert interval.low == pytest.approx(known.low, abs=0.005)
        assert interval.high == pytest.approx(known.high, abs=0.005)
    assert bootstrap_intervals(values) == found != bootstrap_intervals(values, seed=1)


def test_the_variance_of_a_mean_is_split_into_prompts_and_samples() -> None:
    rewards = np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    found = spread(rewards)
    total = rewards.mean(1).var(ddof=1) / 4
    assert found.within == pytest.approx(0.25 / 8) and found.between == pytest.approx(
        total - 0.03125
    )
    alike = spread(np.tile([0.0, 1.0], (6, 1)))
    assert alike.between == 0 and alike.within == 0
    assert spread(rewards[:, :1]) == (rewards[:, 0].var(ddof=1) / 4, 0.0)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (
            np.repeat([[1.0], [0.0]] * 20, 4, axis=1),
            "more samples cannot bring it under ±16.2 points",
        ),
        (
            np.tile([[1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0]], (20, 1)),
            "8 samples of each prompt",
        ),
        (np.ones((9, 2)), "all prompts say the same"),
        (np.array([[0.0], [1.0]] * 9), "2 samples of each, which tell"),
        (np.array([[0.3], [0.9]] * 9), r"\(18 prompts: rough\)"),
    ],
)
def test_one_sentence_says_what_would_help(rewards: np.ndarray, said: str) -> None:
    assert re.search(said, advice(rewards)), advice(rewards)


def test_an_interval_is_told_in_brackets() -> None:
    assert Interval(0.847, 0.8241, 0.868).text == "0.847 [0.824, 0.868]"
