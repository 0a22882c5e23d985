"""Comparisons of two models on the same prompts: false alarms, power, and known cases."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from oxrl_stats.intervals import Interval
from oxrl_stats.paired import difference, holm, mcnemar, sign_flips

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation.md"
DRAWS = 4_000
FEWER_FLIPS = 199


def rejections(
    prompts: int, samples: int, *, better_by: float = 0.0, draws: int = DRAWS
) -> tuple[float, float]:
    """In how many of 100 comparisons p, and mid-p, are at most 5 %."""
    random = np.random.default_rng(prompts + samples)
    chances = random.beta(0.5, 0.5, (draws, prompts))
    others = np.clip(chances + better_by, 0, 1)
    one = random.binomial(samples, others)
    two = random.binomial(samples, chances)
    found = [
        sign_flips(row, flips=FEWER_FLIPS, seed=seed)
        for seed, row in enumerate((one - two) / samples)
    ]
    told = np.array([(chance.p, chance.mid_p) for chance in found])
    p, mid_p = 100 * (told <= 0.05).mean(0)
    return float(p), float(mid_p)


@pytest.mark.parametrize(("prompts", "samples"), [(10, 4), (20, 4), (50, 1), (100, 4), (300, 4)])
def test_models_that_do_not_differ_are_seldom_told_apart(prompts: int, samples: int) -> None:
    p, mid_p = rejections(prompts, samples)
    assert f"\n| {prompts} x {samples} | {p:.1f} | {mid_p:.1f} |\n" in PAGE.read_text()
    assert p <= 5.5
    if prompts >= 50:
        assert 3 <= mid_p <= 6


def test_a_model_that_is_better_by_ten_points_is_found() -> None:
    p, _ = rejections(300, 4, better_by=0.1, draws=400)
    assert p >= 95


@pytest.mark.parametrize("prompts", [50, 100, 1000])
def test_mcnemar_gives_few_false_alarms(prompts: int) -> None:
    random = np.random.default_rng(prompts)
    pairs = random.binomial(prompts, 0.2, DRAWS)
    first = random.binomial(pairs, 0.5)
    told = [mcnemar(int(a), int(n - a)) for a, n in zip(first, pairs, strict=True)]
    assert np.mean(np.array(told) <= 0.05) <= 0.055


@pytest.mark.parametrize("prompts", [5, 8, 12])
@pytest.mark.parametrize("graded", [False, True])
def test_of_few_prompts_every_flip_is_tried(prompts: int, graded: bool) -> None:
    random = np.random.default_rng(prompts)
    values = random.random(prompts) - 0.3 if graded else random.integers(-4, 5, prompts) / 4
    known = stats.permutation_test(
        (values,),
        lambda x, axis: np.abs(x.mean(axis)),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
        alternative="greater",
    )
    found = sign_flips(values)
    assert found.p == pytest.approx(known.pvalue, abs=1e-12)
    others = known.null_distribution
    equal = np.isclose(others, known.statistic).mean()
    assert found.mid_p == pytest.approx(found.p - equal / 2, abs=1e-12)


def test_flips_that_are_drawn_come_close_to_all_of_them() -> None:
    values = np.random.default_rng(1).random(13) - 0.35
    known = stats.permutation_test(
        (values,),
        lambda x, axis: np.abs(x.mean(axis)),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
        alternative="greater",
    )
    found = sign_flips(values)
    assert found.p == pytest.approx(known.pvalue, abs=0.015)
    assert sign_flips(values) == found != sign_flips(values, seed=1)
    # Never 0: the observed one is one of those that could have been.
    assert sign_flips(np.ones(60)).p == 1 / 10_000


@pytest.mark.parametrize("prompts", [6, 40])
def test_no_difference_at_all_is_chance(prompts: int) -> None:
    assert sign_flips(np.zeros(prompts)).p == 1.0
    assert difference(np.zeros(prompts)) == Interval(0.0, 0.0, 0.0)


def test_a_difference_has_students_interval() -> None:
    values = np.random.default_rng(2).random(20) - 0.4
    known = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = difference(values)
    assert (found.low, found.high) == pytest.approx((known.low, known.high), abs=1e-12)
    assert math.isnan(difference(values[:4]).low)


def test_discordant_prompts_are_tested() -> None:
    assert mcnemar(3, 1) == pytest.approx(stats.binomtest(3, 4).pvalue, abs=1e-12)
    assert mcnemar(0, 0) == 1.0


def test_several_tests_are_adjusted_as_others_do() -> None:
    # statsmodels 0.14, multipletests(method="holm").
    given = [0.01, 0.04, 0.03, 0.005]
    assert holm(given) == pytest.approx([0.03, 0.06, 0.06, 0.02], abs=1e-12)
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == []
