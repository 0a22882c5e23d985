"""Advantages against plain Python: several groups, ties, bounds, thresholds, defaults."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    gae,
    length_adaptive_lambda,
    optimal_token_baseline,
    teacher_gap,
    whiten,
)
from oxrl.functional.group_advantages import (
    Groups,
    group_center,
    group_center_batch_std,
    group_center_centered_std,
    group_center_rescaled,
    group_normalize,
    leave_one_out,
    length_weighted_center,
)
from oxrl.functional.robust_advantages import iqr_normalize
from oxrl.functional.success_advantages import (
    failure_chance,
    mean_normalize,
    pass_at_k_advantage,
    pass_at_k_rewards,
    top_gap,
)

NAN = float("nan")


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Tensor, expected: Sequence[Any], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, f64(expected), rtol=tolerance, atol=tolerance)


# --- rows of several prompts: 0 mixed, 1 all the same, 2 alone, 3 with a tie for the best ---

IDS = [3, 0, 1, 0, 3, 2, 1, 0, 3, 0]
MIXED = [2.0, 0.5, 0.3, -1.0, 2.0, 7.0, 0.3, 4.0, -0.5, 0.5]
BINARY = [1.0, 0, 1, 1, 1, 1, 1, 0, 0, 0]


def by_group(rewards: list[float], estimate: Callable[[list[float]], list[float]]) -> list[float]:
    """The estimate of each group's rewards, put back in the order of rows."""
    found = [0.0] * len(rewards)
    for group in set(IDS):
        places = [i for i, owner in enumerate(IDS) if owner == group]
        for place, value in zip(places, estimate([rewards[i] for i in places]), strict=True):
            found[place] = value
    return found


def centered(group: list[float]) -> list[float]:
    if max(group) == min(group):
        return [0.0] * len(group)
    return [r - statistics.fmean(group) for r in group]


def test_the_reward_minus_the_groups_mean() -> None:
    expected = by_group(MIXED, centered)
    close(group_center(f64(MIXED), torch.tensor(IDS)), expected)
    assert group_center(torch.tensor(MIXED), torch.tensor(IDS)).dtype == torch.float32


@pytest.mark.parametrize("eps", [1e-8, 0.3])
def test_the_reward_in_standard_deviations_of_its_group(eps: float) -> None:
    def of(group: list[float]) -> list[float]:
        std = statistics.stdev(group) if len(group) > 1 else 0.0
        return [c / (std + eps) for c in centered(group)]

    close(group_normalize(f64(MIXED), torch.tensor(IDS), eps=eps), by_group(MIXED, of))
    if eps == 1e-8:
        close(group_normalize(f64(MIXED), torch.tensor(IDS)), by_group(MIXED, of))


def test_the_reward_minus_that_of_the_others() -> None:
    def of(group: list[float]) -> list[float]:
        if len(group) == 1:
            return [0.0]
        total = sum(group)
        return [r - (total - r) / (len(group) - 1) for r in group]

    close(leave_one_out(f64(MIXED), torch.tensor(IDS)), by_group(MIXED, of))


@pytest.mark.parametrize("eps", [1e-8, 0.3])
def test_the_scale_of_centred_rewards_leaves_the_groups_means_out(eps: float) -> None:
    differences = by_group(MIXED, centered)
    std = statistics.stdev(differences)
    expected = [c / (std + eps) for c in differences]
    close(group_center_centered_std(f64(MIXED), torch.tensor(IDS), eps=eps), expected)
    if eps == 1e-8:
        close(ADVANTAGES["group_center_centered_std"](rows_of(MIXED))[0][:, 0], expected)
    for size in (1, 2):
        alone = group_center_centered_std(f64([3.0] * size), torch.zeros(size, dtype=torch.long))
        assert alone.tolist() == [0.0] * size


@pytest.mark.parametrize("eps", [1e-8, 0.3])
def test_the_scale_of_the_batch_is_that_of_its_rewards(eps: float) -> None:
    """Not of the centred advantages, nor of a group."""
    std = statistics.stdev(MIXED)
    expected = [c / (std + eps) for c in by_group(MIXED, centered)]
    found = ADVANTAGES["group_center_batch_std"](rows_of(MIXED))[0][:, 0]
    close(group_center_batch_std(f64(MIXED), torch.tensor(IDS), eps=eps), expected)
    if eps == 1e-8:
        close(found, expected)
    for size in (1, 2):
        alone = group_center_batch_std(f64([3.0] * size), torch.zeros(size, dtype=torch.long))
        assert alone.tolist() == [0.0] * size


def test_rows_that_teach_nothing_are_made_up_for() -> None:
    """Groups 0 and 3 teach: 7 of 10 rows."""
    expected = [c * 10 / 7 for c in by_group(MIXED, centered)]
    close(group_center_rescaled(f64(MIXED), torch.tensor(IDS)), expected)
    assert not group_center_rescaled(f64([1.0, 1.0]), torch.tensor([0, 0])).any()


def test_the_length_weighted_baseline() -> None:
    lengths = [1, 2, 3, 4, 5, 6, 7, 0, 2, 9]

    def baseline(group: int) -> float:
        rows = [i for i in range(10) if IDS[i] == group]
        return sum(MIXED[i] * lengths[i] for i in rows) / sum(lengths[i] for i in rows)

    expected = [0.0 if IDS[i] in (1, 2) else MIXED[i] - baseline(IDS[i]) for i in range(10)]
    close(length_weighted_center(f64(MIXED), torch.tensor(IDS), torch.tensor(lengths)), expected)
    empty = length_weighted_center(f64([1.0, 0.5]), torch.tensor([0, 0]), torch.tensor([0, 0]))
    close(empty, [1.0, 0.5])


@pytest.mark.parametrize("eps", [1e-6, 0.2])
def test_the_lead_of_the_single_best(eps: float) -> None:
    def of(group: list[float]) -> list[float]:
        best = max(group)
        if len(group) == 1 or group.count(best) > 1:
            return [0.0] * len(group)
        second = max(r for r in group if r < best)
        return [(best - second) / (statistics.stdev(group) + eps) * (r == best) for r in group]

    expected = by_group(MIXED, of)
    assert sum(x != 0 for x in expected) == 1
    close(top_gap(f64(MIXED), torch.tensor(IDS), eps=eps), expected)
    if eps == 1e-6:
        close(top_gap(f64(MIXED), torch.tensor(IDS)), expected)
    shifted = [r - 10 for r in MIXED]
    close(top_gap(f64(shifted), torch.tensor(IDS), eps=eps), expected)


@pytest.mark.parametrize("eps", [1e-6, 0.2])
def test_the_reward_relative_to_the_success_rate(eps: float) -> None:
    def of(group: list[float]) -> list[float]:
        rate = statistics.fmean(group)
        return [c / (rate + eps) for c in centered(group)]

    close(mean_normalize(f64(BINARY), torch.tensor(IDS), eps=eps), by_group(BINARY, of))
    if eps == 1e-6:
        close(mean_normalize(f64(BINARY), torch.tensor(IDS)), by_group(BINARY, of))


# --- pass@k, by counting draws ---


def pass_rate(rewards: Sequence[float], k: int) -> float:
    """Share of the draws of k without replacement that have a right row; the whole where k > n."""
    draws = list(itertools.combinations(rewards, min(k, len(rewards))))
    return sum(any(draw) for draw in draws) / len(draws)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 7])
@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 1), (5, 2), (5, 4), (5, 5), (1, 0), (0, 0)])
def test_the_chance_that_every_draw_fails(n: int, c: int, k: int) -> None:
    """A draw of more rows than there are is a draw of all."""
    group = [1.0] * c + [0.0] * (n - c)
    found = failure_chance(f64([float(n)]), f64([float(c)]), k=k).item()
    expected = 1.0 if k == 0 else 1 - pass_rate(group, k)
    assert found == pytest.approx(expected, abs=1e-12)


def shares(group: Sequence[float], k: int) -> list[float]:
    """s_i: k/n where right, k/n * pass@(k-1) of the other rows where wrong."""
    n = len(group)
    found = []
    for i, r in enumerate(group):
        others = [*group[:i], *group[i + 1 :]]
        reached = 1.0 if r else (pass_rate(others, k - 1) if k > 1 and others else 0.0)
        found.append(k / n * reached)
    return found


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("c", [0, 1, 2, 3, 4, 5])
def test_the_contribution_to_pass_at_k_and_its_baseline(c: int, k: int) -> None:
    """The baseline of row i is the mean contribution of the others, computed without it."""
    group = [1.0] * c + [0.0] * (5 - c)
    ids = torch.zeros(5, dtype=torch.long)
    close(pass_at_k_rewards(f64(group), ids, pass_k=k), shares(group, k))
    close(pass_at_k_advantage(f64(group), ids, pass_k=k), pass_at_k_of(group, k))


def pass_at_k_of(group: list[float], k: int) -> list[float]:
    """n s_i minus the mean contribution of the others without row i; 0 where all are alike."""
    n = len(group)
    if sum(group) in (0, n):
        return [0.0] * n
    found = []
    for i, share in enumerate(shares(group, k)):
        rest = [*group[:i], *group[i + 1 :]]
        baseline = statistics.fmean((n - 1) * s for s in shares(rest, k))
        found.append(n * share - baseline)
    return found


def test_pass_at_k_of_several_groups_and_of_a_group_of_one() -> None:
    for k in (1, 2):
        expected = by_group(BINARY, lambda group: pass_at_k_of(group, k))  # noqa: B023
        close(pass_at_k_advantage(f64(BINARY), torch.tensor(IDS), pass_k=k), expected)


def quartiles_of(group: list[float], floor: float) -> list[float]:
    if max(group) - min(group) <= 1e-6:
        return [0.0] * len(group)
    low, middle, high = statistics.quantiles(group, n=4, method="inclusive")
    return [(reward - middle) / max(high - low, floor) for reward in group]


@pytest.mark.parametrize("floor", [0.5, 3.0, 1e-3])
def test_rewards_in_quartiles_of_their_groups(floor: float) -> None:
    expected = by_group(MIXED, lambda group: quartiles_of(group, floor) if group[1:] else [0.0])
    close(iqr_normalize(f64(MIXED), torch.tensor(IDS), iqr_floor=floor), expected)
    if floor == 0.5:
        close(iqr_normalize(f64(MIXED), torch.tensor(IDS)), expected)
    assert iqr_normalize(f64([1.0, 0.0]).float(), torch.tensor([0, 0])).dtype == torch.float32


@pytest.mark.parametrize("odd", [40.0, -1e6])
def test_one_odd_reward_among_eight_leaves_the_others_apart(odd: float) -> None:
    """Best and worst of seven ordinary rewards stay about two ranges apart, whether the odd one is beside
    them or not; of standard deviations they are a hundredth apart, or nothing.
    """
    ids = torch.zeros(8, dtype=torch.long)
    ordinary = [0.0, 0.2, 0.3, 0.5, 0.6, 0.8, 1.0]
    found = iqr_normalize(f64([*ordinary, odd]), ids, iqr_floor=1e-9)
    plain = iqr_normalize(f64(ordinary), ids[:7], iqr_floor=1e-9)
    spread = float(found[6] - found[0])
    assert spread == pytest.approx(1.0 / (0.85 - 0.275 if odd > 0 else 0.65 - 0.15), rel=1e-9)
    assert 0.75 < spread / float(plain[6] - plain[0]) < 1.3
    normal = group_normalize(f64([*ordinary, odd]), ids)
    assert float(normal[6] - normal[0]) < 0.1
    assert (found[:7].diff() > 0).all()


def climbing(group: list[float], order: int) -> list[float]:
    """R sum_{k < T} m(k) - (1 - m(T)), m(k) the share of draws of k other rows that are all wrong."""
    found = []
    for i, reward in enumerate(group):
        others = [other for j, other in enumerate(group) if j != i]
        terms = min(order, len(others))

        def miss(k: int, others: list[float] = others) -> float:
            draws = list(itertools.combinations(others, k))
            return sum(not any(draw) for draw in draws) / len(draws)

        found.append(reward * sum(map(miss, range(terms))) - 1 + miss(terms))
    return found


@pytest.mark.parametrize("order", [1, 2, 3, 4, 9])
def test_a_series_that_ends_early_from_pass_at_one_to_likelihood(order: int) -> None:
    ids = torch.tensor(IDS)
    found = mean_normalize(f64(BINARY), ids, maxrl_order=order)
    close(found, by_group(BINARY, lambda group: climbing(group, order)))
    if order == 1:
        close(found, leave_one_out(f64(BINARY), ids).tolist())
    if order > 3:
        close(found, mean_normalize(f64(BINARY), ids).tolist(), 1e-5)


TWO_LONG = {
    "mask": torch.tensor([[False, True, True, True], [False, True, False, False]]),
    "group_ids": torch.tensor([0, 0]),
}


def test_a_token_that_one_response_alone_has_is_given_its_return() -> None:
    """The first tokens weigh alike: B = 1 / 2; the others have no company."""
    rewards = f64([[NAN, NAN, 0.25, 0.75], [0, 0, 0, 0]])
    half = torch.full((2, 4), 0.5, dtype=torch.float64)
    found = optimal_token_baseline(rewards, **TWO_LONG, logprobs=half.log(), sum_p_squared=half)
    close(found, [[0, 0.5, 1.0, 0.75], [0, -0.5, 0, 0]])


def test_the_token_baseline_leans_towards_uncertain_responses() -> None:
    """Squared norms .02 of a sure token and .5 of an even choice: B = .5 / .52 of the other's return."""
    rewards = f64([[0, 0, 0, 0], [0, 1.0, 0, 0]])
    p = f64([[1, 0.9, 0.9, 0.9], [1, 0.5, 1, 1]])
    squares = f64([[NAN, 0.82, 0.82, 0.82], [NAN, 0.5, NAN, NAN]])
    found = optimal_token_baseline(rewards, **TWO_LONG, logprobs=p.log(), sum_p_squared=squares)
    close(found[:, 1], [-0.5 / 0.52, 0.02 / 0.52])


def test_no_squared_norm_is_below_zero_however_probabilities_were_rounded() -> None:
    """Of a sum of squares that is too small for its largest term, here by far: the response weighs
    nothing, and the other's return is the baseline. Nothing flows back.
    """
    rewards = f64([[0, 0, 0, 0], [0, 1.0, 0, 0]])
    p = f64([[1, 0.9, 0.9, 0.9], [1, 0.5, 1, 1]])
    squares = f64([[NAN, 0.5, 0.5, 0.5], [NAN, 0.5, NAN, NAN]]).requires_grad_()
    logprobs = p.log().requires_grad_()
    found = optimal_token_baseline(rewards, **TWO_LONG, logprobs=logprobs, sum_p_squared=squares)
    assert not found.requires_grad
    close(found[:, 1], [-1.0, 0.0])


def test_equal_returns_and_responses_alone_have_no_token_baseline_to_learn_from() -> None:
    rewards = f64([[0, 0, 0, 1.0], [0, 1.0, 0, 0]])
    p = torch.full((2, 4), 0.7, dtype=torch.float64)
    given = {**TWO_LONG, "logprobs": p.log(), "sum_p_squared": p**2}
    assert not optimal_token_baseline(rewards, **given).any()
    apart = {**given, "group_ids": torch.tensor([0, 1])}
    assert not optimal_token_baseline(rewards, **apart).any()
    # Tokens that the model was sure of to the last digit weigh nothing, and divide by nothing.
    sure = {**given, "logprobs": 0 * p, "sum_p_squared": 1 + 0 * p}
    found = optimal_token_baseline(2 * rewards - f64([[1.0], [0]]), **sure)
    assert found.isfinite().all() and found.dtype == torch.float64


@pytest.mark.parametrize("estimate", [mean_normalize, pass_at_k_advantage])
def test_half_a_success_is_refused(estimate: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"rewards must be 0 or 1, got \[0.5, 1.0\]"):
        estimate(f64([1, 0.5]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"got \[2.0, 3.0, 4.0, 5.0, 6.0\]"):
        estimate(f64([7, 6, 5, 4, 3, 2]), torch.zeros(6, dtype=torch.long))


@pytest.mark.parametrize(
    "estimate",
    [
        group_center,
        group_normalize,
        leave_one_out,
        group_center_batch_std,
        top_gap,
        iqr_normalize,
    ],
)
def test_rewards_that_are_not_one_finite_number_per_row_are_refused(
    estimate: Callable[..., Tensor],
) -> None:
    with pytest.raises(ValueError, match="one per response"):
        estimate(f64([[1, 0]]), torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match="group_ids has shape"):
        estimate(f64([1, 0]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"rows \[0, 2\] are not finite"):
        estimate(f64([math.inf, 0, NAN]), torch.tensor([0, 0, 0]))
    many = [NAN] * 10
    with pytest.raises(ValueError, match=r"rows \[0, 1, 2, 3, 4, 5, 6, 7\] are"):
        estimate(f64(many), torch.zeros(10, dtype=torch.long))


def test_groups_are_flat_up_to_a_millionth() -> None:
    """Of the mean, or of 1 where the mean is smaller; whatever its sign."""
    for base in (0.0, 0.5, 1000.0, -1000.0):
        bound = 1e-6 * max(abs(base), 1.0)
        ids = torch.tensor([0, 0, 1, 1, 2])
        near, far = bound * 0.9, bound * 1.1
        rewards = f64([base, base + near, base, base + far, base])
        assert Groups.of(ids).flat(rewards).tolist() == [True, True, False, False, True]


def test_a_spread_of_exactly_a_millionth_is_flat() -> None:
    assert Groups.of(torch.tensor([0, 0])).flat(f64([0.0, 1e-6])).tolist() == [True, True]


def test_a_group_of_two() -> None:
    """Its standard deviation is |a - b| / sqrt 2, its pass@2 is reached by either row."""
    ids = torch.tensor([0, 0])
    rewards = f64([3.0, 1.0])
    half = 1 / math.sqrt(2)
    close(Groups.of(ids).std(rewards), [math.sqrt(2)] * 2)
    close(group_normalize(rewards, ids, eps=0.0), [half, -half])
    close(group_center_batch_std(rewards, ids, eps=0.0), [half, -half])
    close(group_center_centered_std(rewards, ids, eps=0.0), [half, -half])
    close(leave_one_out(rewards, ids), [2.0, -2.0])
    close(top_gap(rewards, ids, eps=0.0), [math.sqrt(2), 0.0])
    for k in (1, 2):
        expected = pass_at_k_of([1.0, 0.0], k)
        close(pass_at_k_advantage(f64([1.0, 0.0]), ids, pass_k=k), expected)
    # The only token is that of the first row, which is then its own baseline.
    lengths = torch.tensor([1, 0])
    close(length_weighted_center(rewards, ids, lengths), [0.0, -2.0])


def test_statistics_of_groups() -> None:
    groups = Groups.of(torch.tensor([5, -2, 5, 5]))
    x = f64([1.0, 10.0, 4.0, 1.0])
    close(groups.sum(x), [6, 10, 6, 6])
    close(groups.mean(x), [2, 10, 2, 2])
    close(groups.size, [3, 1, 3, 3])
    close(groups.extreme(x, "amax"), [4, 10, 4, 4])
    close(groups.extreme(-x, "amax"), [-1, -10, -1, -1])
    close(groups.extreme(x, "amin"), [1, 10, 1, 1])
    close(groups.std(x), [math.sqrt(3), 0, math.sqrt(3), math.sqrt(3)])


# --- tokens ---


def test_the_gap_to_the_teacher_is_bounded_at_10_and_carries_no_gradient() -> None:
    mask = torch.tensor([[True, True, True, True, False]])
    old = f64([[-1.0, -12.0, -0.5, -2.0, NAN]]).requires_grad_()
    teacher = f64([[-2.5, -0.5, -14.0, -11.5, NAN]]).requires_grad_()
    found = teacher_gap(old, teacher, mask)
    close(found, [[-1.5, 10.0, -10.0, -9.5, 0.0]])
    assert not found.requires_grad
    for first, second in ((old, teacher.detach()), (old.detach(), teacher)):
        assert not teacher_gap(first, second, mask).requires_grad


def plain_gae(
    rewards: list[float], values: list[float], after: float, gamma: float, trace: float
) -> list[float]:
    found = []
    following, advantage = after, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * trace * advantage
        following = value
        found.append(advantage)
    return found[::-1]


REWARDS, VALUES = [0.3, -0.2, 1.0], [0.5, 0.1, 0.7]
ALL = torch.ones(1, 3, dtype=torch.bool)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("trace", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("after", [0.0, 0.8])
def test_gae_at_and_between_the_bounds_of_its_numbers(
    gamma: float, trace: float, after: float
) -> None:
    expected = plain_gae(REWARDS, VALUES, after, gamma, trace)
    found, returns = gae(
        f64([REWARDS]), f64([VALUES]), ALL, f64([after]), gamma=gamma, gae_lambda=trace
    )
    close(found, [expected])
    close(returns, [[a + v for a, v in zip(expected, VALUES, strict=True)]])
    if gamma == trace == 1.0 and not after:
        close(gae(f64([REWARDS]), f64([VALUES]), ALL)[0], [expected])


@pytest.mark.parametrize("gamma", [-0.1, -1.0, 1.1, 2.0])
def test_a_discount_outside_0_and_1_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        gae(f64([REWARDS]), f64([VALUES]), ALL, gamma=gamma)


@pytest.mark.parametrize("trace", [-0.1, 1.1, 2.0, [0.5, 1.1], [-0.1, 0.5], [0.5, 1.5], [-0.5, 1]])
def test_a_lambda_outside_0_and_1_is_refused_in_any_row(trace: Any) -> None:
    rows = f64([REWARDS] * 2)
    mask = torch.ones(2, 3, dtype=torch.bool)
    numbers = f64(trace) if isinstance(trace, list) else trace
    with pytest.raises(ValueError, match="must lie in"):
        gae(rows, rows, mask, gae_lambda=numbers)


def test_advantages_and_returns_carry_no_gradient() -> None:
    leaves = [f64([REWARDS]), f64([VALUES]), f64([0.4])]
    for i in range(3):
        given = [x.clone().requires_grad_() if i == j else x for j, x in enumerate(leaves)]
        found, returns = gae(given[0], given[1], ALL, given[2], gamma=0.9, gae_lambda=0.8)
        assert not found.requires_grad and not returns.requires_grad


def test_float32_values_give_float32_advantages_of_float64_accuracy() -> None:
    found, returns = gae(torch.tensor([REWARDS]), torch.tensor([VALUES]), ALL, gamma=0.9)
    assert found.dtype == returns.dtype == torch.float32
    half = torch.tensor([VALUES], dtype=torch.bfloat16)
    assert gae(f64([REWARDS]), half, ALL)[0].dtype == torch.float32


@pytest.mark.parametrize("alpha", [0.05, 0.5, 2.0])
def test_lambda_grows_with_the_length_of_the_row(alpha: float) -> None:
    lengths = [0, 1, 2, 10, 39, 40, 60]
    mask = torch.arange(60)[None] < torch.tensor(lengths)[:, None]
    expected = [max(0.0, 1 - 1 / (alpha * n)) if n else 0.0 for n in lengths]
    close(length_adaptive_lambda(mask, length_alpha=alpha), expected)
    if alpha == 0.05:
        close(length_adaptive_lambda(mask), expected)


# --- whitening ---


def whitened(values: list[float], eps: float) -> list[float]:
    mean, variance = statistics.fmean(values), statistics.variance(values)
    return [(v - mean) / math.sqrt(variance + eps) for v in values]


@pytest.mark.parametrize("eps", [1e-8, 0.5, 0.0])
@pytest.mark.parametrize(
    "values", [[1.0, 3.0, -2.0], [1.0, 1.001], [1e-4, -1e-4], [-5.0, -5.001, -5.003]]
)
def test_whitening_adds_eps_to_the_variance(values: list[float], eps: float) -> None:
    """Inside the root: for a variance of 2e-8, sqrt(3e-8) and neither sqrt(2e-8) + 1e-8 nor
    sqrt(2e-8).
    """
    mask = torch.tensor([[True] * len(values) + [False]])
    found = whiten(f64([[*values, NAN]]), mask, eps=eps)
    close(found, [[*whitened(values, eps), 0.0]], 1e-9)
    if eps == 1e-8:
        close(whiten(f64([[*values, NAN]]), mask), [[*whitened(values, eps), 0.0]], 1e-9)


@pytest.mark.parametrize("base", [1000.0, -1000.0])
def test_values_equal_up_to_a_millionth_are_only_centered(base: float) -> None:
    near, far = 1e-3 * math.sqrt(2) * 0.99, 1e-3 * math.sqrt(2) * 1.01
    mask = torch.ones(1, 2, dtype=torch.bool)
    close(whiten(f64([[base, base + near]]), mask), [[-near / 2, near / 2]], 1e-9)
    close(whiten(f64([[base, base + far]]), mask), [whitened([0.0, far], 1e-8)], 1e-7)


def test_the_bound_of_whitening_is_measured_on_the_largest_value() -> None:
    """A standard deviation between a millionth of the smallest and of the largest value."""
    step = math.sqrt(2) * 1e-6 * (1 + 0.7e-6)
    found = whiten(f64([[1.0, 1.0 + step]]), torch.ones(1, 2, dtype=torch.bool))
    assert found[0].tolist() == pytest.approx([-step / 2, step / 2], rel=1e-6)


def test_whitening_is_in_the_dtype_of_its_input_and_needs_two_tokens() -> None:
    mask = torch.tensor([[True, True, False]])
    assert whiten(torch.tensor([[1.0, 2.0, 3.0]]), mask).dtype == torch.float32
    two = whiten(f64([[1.0, 3.0, 9.0]]), mask)
    close(two, [[*whitened([1.0, 3.0], 1e-8), 0.0]], 1e-9)
    none = whiten(f64([[5.0, 6.0, 7.0]]), torch.zeros_like(mask))
    assert none.tolist() == [[0.0, 0.0, 0.0]]


# --- cells ---


def rows_of(rewards: list[float], **further: Any) -> AdvantageInputs:
    """Rows of two tokens, the reward on the second, and a column of padding."""
    count = len(rewards)
    mask = torch.tensor([[True, True, False]] * count)
    return AdvantageInputs(
        rewards=f64(rewards),
        token_rewards=f64([[0.0, r, NAN] for r in rewards]),
        response_mask=mask,
        group_ids=torch.tensor(IDS[:count]),
        **further,
    )


@pytest.mark.parametrize("coeff", [1.0, 0.5, -2.0])
def test_the_teacher_is_added_to_the_outcome(coeff: float) -> None:
    old = f64([[-1.0, -2.0, NAN]] * 10)
    teacher = f64([[-0.5, -2.2, NAN]] * 10)
    inputs = rows_of(MIXED, old_logprobs=old, teacher_logprobs=teacher)

    def of(group: list[float]) -> list[float]:
        std = statistics.stdev(group) if len(group) > 1 else 0.0
        return [c / (std + 1e-8) for c in centered(group)]

    outcome = by_group(MIXED, of)
    numbers = {} if coeff == 1.0 else {"teacher_coeff": coeff}
    found, returns = ADVANTAGES["group_normalize_teacher"](inputs, **numbers)
    close(found, [[x + coeff * 0.5, x - coeff * 0.2, 0.0] for x in outcome])
    gap, _ = ADVANTAGES["teacher_gap"](inputs, **numbers)
    close(gap, [[coeff * 0.5, -coeff * 0.2, 0.0]] * 10)
    assert returns is None


def test_defaults_of_the_cells_with_a_critic() -> None:
    """gamma 1, lambda 1, whitened, no bootstrap; a bootstrap counts for cut rows alone."""
    values = f64([[0.2, 0.4, NAN]] * 4)
    inputs = replace(
        rows_of(MIXED[:4]),
        values=values,
        bootstrap=f64([0.9] * 4),
        truncated=torch.tensor([True, False, True, False]),
    )
    flat = [r - v for r in MIXED[:4] for v in (0.2, 0.4)]
    expected = whitened(flat, 1e-8)
    found, returns = ADVANTAGES["gae"](inputs)
    close(found[:, :2].flatten(), expected, 1e-9)
    assert returns is not None
    close(returns[:, :2].flatten(), [r for r in MIXED[:4] for _ in range(2)])
    cut, _ = ADVANTAGES["gae"](inputs, whiten=False, bootstrap_on_truncation=True)
    ends = [r + 0.9 * (i % 2 == 0) for i, r in enumerate(MIXED[:4])]
    close(cut[:, :2].flatten(), [e - v for e in ends for v in (0.2, 0.4)])


def test_the_length_adaptive_cell_learns_the_full_return() -> None:
    """Two tokens and alpha 1: lambda 1/2 for the policy, 1 for the critic."""
    values = f64([[0.2, 0.4, NAN]] * 4)
    inputs = replace(
        rows_of(MIXED[:4]),
        values=values,
        bootstrap=f64([0.9] * 4),
        truncated=torch.tensor([True, False, True, False]),
    )
    numbers = {"length_alpha": 1.0, "whiten": False, "bootstrap_on_truncation": True}
    found, returns = ADVANTAGES["gae_length_adaptive"](inputs, gamma=0.9, **numbers)
    assert returns is not None
    for i, reward in enumerate(MIXED[:4]):
        after = 0.9 if i % 2 == 0 else 0.0
        close(found[i, :2], plain_gae([0.0, reward], [0.2, 0.4], after, 0.9, 0.5))
        full = plain_gae([0.0, reward], [0.2, 0.4], after, 0.9, 1.0)
        close(returns[i, :2], [full[0] + 0.2, full[1] + 0.4])
    plain, _ = ADVANTAGES["gae_length_adaptive"](inputs)
    # alpha 0.05 and two tokens: lambda 0, whitened, no bootstrap
    flat = [x for r in MIXED[:4] for x in (0.4 - 0.2, r - 0.4)]
    close(plain[:, :2].flatten(), whitened(flat, 1e-8), 1e-9)


def test_cells_without_a_critic() -> None:
    inputs = rows_of(MIXED)
    returns, targets = ADVANTAGES["returns"](inputs, gamma=0.5)
    close(returns, [[r / 2, r, 0.0] for r in MIXED])
    assert targets is None
    close(ADVANTAGES["returns"](inputs)[0], [[r, r, 0.0] for r in MIXED])
    flat = [x for r in MIXED for x in (r / 2, r)]
    found, targets = ADVANTAGES["whitened_returns"](inputs, gamma=0.5)
    close(found[:, :2].flatten(), whitened(flat, 1e-8), 1e-9)
    assert targets is None
    mean = statistics.fmean(MIXED)
    close(ADVANTAGES["batch_center"](inputs)[0], [[r - mean] * 2 + [0.0] for r in MIXED])
    doubled = [c for c in by_group(MIXED, centered) for _ in range(2)]
    found, _ = ADVANTAGES["group_center_whitened"](inputs)
    close(found[:, :2].flatten(), whitened(doubled, 1e-8), 1e-9)
    greedy = replace(inputs, greedy_rewards=f64([0.5] * 10))
    close(ADVANTAGES["greedy_baseline"](greedy)[0], [[r - 0.5] * 2 + [0.0] for r in MIXED])


def test_cells_that_pass_numbers_and_lengths_on() -> None:
    binary = rows_of(BINARY)
    for numbers, k in (({}, 2), ({"pass_k": 1}, 1)):
        found, _ = ADVANTAGES["pass_at_k"](binary, **numbers)
        close(found[:, 0], by_group(BINARY, lambda group: pass_at_k_of(group, k)))  # noqa: B023
    mask = torch.tensor([[True, True, True], [True, False, False]])
    inputs = AdvantageInputs(
        rewards=f64([1.0, 0.0]),
        token_rewards=f64([[0.0, 0, 1], [0, 0, 0]]),
        response_mask=mask,
        group_ids=torch.tensor([1, 1]),
    )
    found, _ = ADVANTAGES["length_weighted_center"](inputs)
    close(found, [[0.25, 0.25, 0.25], [-0.75, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("gae", "values"),
        ("gae_length_adaptive", "values"),
        ("greedy_baseline", "greedy_rewards"),
        ("teacher_gap", "old_logprobs"),
    ],
)
def test_a_cell_without_what_it_reads_says_so(name: str, needed: str) -> None:
    with pytest.raises(ValueError, match=f"needs {needed}"):
        ADVANTAGES[name](rows_of(MIXED))
