from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from oxrl.functional.ratios import interpolated_anchor
from oxrl.functional.selections import (
    above_row_quantile,
    covariance,
    router_shift,
    select_clip_cov,
    select_kl_cov,
)
from oxrl.functional.shaping import adapt_kl_coeff, informative_groups, overlong_penalty, pass_at_k
from oxrl.functional.success_advantages import (
    mean_normalize,
    pass_at_k_advantage,
    pass_at_k_rewards,
)
from oxrl.functional.weights import length_preference

NAN = float("nan")


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_length_penalty_of_dapo() -> None:
    """E11: limit 20480, buffer 4096."""
    lengths = torch.tensor([16384, 18432, 20480, 20481])
    assert overlong_penalty(lengths, max_tokens=20480, buffer_tokens=4096).tolist() == [
        0,
        -0.5,
        -1,
        -1,
    ]


def test_groups_of_equal_rewards_are_not_informative() -> None:
    rewards, ids = f64([1, 0, 0.1, 0.1, 1]), torch.tensor([5, 5, 2, 2, 7])
    assert informative_groups(rewards, ids).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(("kl", "factor"), [(0.15, 1.00512), (0.05, 0.99488), (0.11, 1.00256)])
def test_the_kl_controller(kl: float, factor: float) -> None:
    """Target .1, 256 rows, horizon 10000; errors beyond 20 % count as 20 %."""
    assert adapt_kl_coeff(2.0, kl, kl_target=0.1, kl_horizon=10_000, rows=256) == pytest.approx(
        2 * factor
    )


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 0.5),
        (4, 2, 2, 0.833333),
        (8, 2, 4, 0.785714),
        (10, 3, 5, 0.916667),
        (6, 0, 3, 0),
        (3, 2, 5, 1),
    ],
)
def test_the_unbiased_pass_at_k(n: int, c: int, k: int, expected: float) -> None:
    """E11."""
    assert float(pass_at_k(torch.tensor(n), torch.tensor(c), k=k)) == pytest.approx(
        expected, abs=1e-6
    )


# --- success advantages ---


def expected_gradient(advantages: object, size: int, p: float) -> float:
    """E[1/G sum_i A_i d log p(y_i) / d logit] of a Bernoulli policy, by enumeration."""
    total = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        rewards = f64(outcome)
        chance = p ** sum(outcome) * (1 - p) ** (size - sum(outcome))
        found = advantages(rewards, torch.zeros(size, dtype=torch.long))  # type: ignore[operator]
        total += chance * float((found * (rewards - p)).mean())
    return total


def pass_at_k_slope(p: float, k: int) -> float:
    """d/d logit of 1 - (1 - p)^k."""
    return k * (1 - p) ** (k - 1) * p * (1 - p)


def test_pass_at_k_rewards_of_one_and_two_successes_in_four() -> None:
    """E3, k = 2."""
    same = torch.zeros(4, dtype=torch.long)
    assert pass_at_k_rewards(f64([1, 0, 0, 0]), same, pass_k=2).tolist() == pytest.approx(
        [0.5, *[1 / 6] * 3]
    )
    assert pass_at_k_rewards(f64([1, 1, 0, 0]), same, pass_k=2).tolist() == pytest.approx(
        [0.5, 0.5, 1 / 3, 1 / 3]
    )


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("baseline", [False, True])
def test_the_pass_at_k_gradient_is_unbiased_with_and_without_its_baseline(
    k: int, baseline: bool
) -> None:
    def raw(rewards: Tensor, ids: Tensor) -> Tensor:
        return 5 * pass_at_k_rewards(rewards, ids, pass_k=k)

    def centered(rewards: Tensor, ids: Tensor) -> Tensor:
        return pass_at_k_advantage(rewards, ids, pass_k=k)

    found = expected_gradient(centered if baseline else raw, 5, 0.3)
    # without row i the baseline needs k tries among four others: exact for k <= 4
    assert found == pytest.approx(pass_at_k_slope(0.3, k), abs=1e-9)


@pytest.mark.parametrize(("size", "k"), [(2, 3), (3, 4), (3, 8)])
def test_a_group_of_fewer_rows_than_k_climbs_the_pass_rate_of_as_many_tries_as_it_has(
    size: int, k: int
) -> None:
    """Rows without a score leave n of k rows: what they can say is pass@n, at its own scale."""

    def raw(rewards: Tensor, ids: Tensor) -> Tensor:
        return size * pass_at_k_rewards(rewards, ids, pass_k=k)

    assert expected_gradient(raw, size, 0.3) == pytest.approx(pass_at_k_slope(0.3, size), abs=1e-9)
    # A right row of two: n s = 2 * 1, less what the wrong one reaches alone, 0. The wrong one: all
    # that it could reach, the right one reaches without it.
    two = pass_at_k_advantage(f64([1, 0]), torch.zeros(2, dtype=torch.long), pass_k=k)
    assert two.tolist() == [2.0, 0.0]
    # Groups of several sizes are each taken for their own: 2 right of 3, and one of four at k = 3.
    mixed = f64([1, 1, 0, 1, 0, 0, 0])
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    of_three = pass_at_k_advantage(mixed[:3], ids[:3], pass_k=3).tolist()
    of_four = pass_at_k_advantage(mixed[3:], ids[3:], pass_k=min(k, 4)).tolist()
    found = pass_at_k_advantage(mixed, ids, pass_k=k).tolist()
    assert found == pytest.approx(of_three + of_four)


@pytest.mark.parametrize("size", [2, 4, 6])
def test_mean_normalized_rewards_climb_the_sum_of_pass_at_k_below_the_group_size(size: int) -> None:
    expected = sum(pass_at_k_slope(0.2, k) / k for k in range(1, size))
    assert expected_gradient(mean_normalize, size, 0.2) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("order", [1, 2, 4, 5])
def test_a_series_that_ends_climbs_the_sum_of_pass_at_k_up_to_there(order: int) -> None:
    def truncated(rewards: Tensor, ids: Tensor) -> Tensor:
        return mean_normalize(rewards, ids, maxrl_order=order)

    expected = sum(pass_at_k_slope(0.2, k) / k for k in range(1, order + 1))
    assert expected_gradient(truncated, 6, 0.2) == pytest.approx(expected, abs=1e-9)


def test_rewards_that_are_no_successes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be 0 or 1, got \[0.5"):
        mean_normalize(f64([0.5, 1]), torch.tensor([0, 0]))


# --- lengths ---


def test_the_length_preference_of_lambda_grpo() -> None:
    """Lengths 2, 4, 6: h = .863917, 1, 1.136083."""
    lengths, ids = f64([2, 4, 6]), torch.tensor([3, 3, 3])
    assert length_preference(lengths, ids, 1.0).tolist() == pytest.approx(
        [0.867, 0.994, 1.139], abs=1e-3
    )
    assert length_preference(lengths, ids, -1.0).tolist() == pytest.approx(
        [1.149, 0.981, 0.870], abs=1e-3
    )
    assert length_preference(lengths, ids, 0.0).tolist() == pytest.approx([1, 1, 1])


def test_the_length_preference_sums_to_the_group_size_and_can_be_learned() -> None:
    power = f64(1.5).requires_grad_()
    preference = length_preference(f64([2, 9, 4, 0, 5, 5]), torch.tensor([0, 0, 0, 0, 1, 1]), power)
    assert preference[:4].sum().item() == pytest.approx(3) and preference[3] == 0
    assert preference[4:].tolist() == [1, 1]
    (slope,) = torch.autograd.grad(preference[1], power)
    assert slope > 0


def test_a_large_power_prefers_the_longest_row_and_does_not_overflow() -> None:
    """h = 1.4166 for the long row of sixteen: 1.4166 ** 20 = 1060, and exp(1060) is no float64."""
    preference = length_preference(f64([*[1] * 15, 9]), torch.zeros(16, dtype=torch.int64), 20.0)
    assert preference.tolist() == [*[0.0] * 15, 16.0]


# --- selections ---

MASK = torch.tensor([[True, True, True, True, False], [True, True, True, True, True]])


def test_the_covariance_is_centered_on_the_trained_tokens() -> None:
    logprobs = torch.where(MASK, -torch.arange(10.0).reshape(2, 5), NAN)
    advantages = torch.where(MASK, torch.arange(10.0).reshape(2, 5) - 4, NAN)
    found = covariance(logprobs, advantages, MASK)
    values = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9.0])
    assert found[MASK].tolist() == pytest.approx(
        (-((values - values.mean()) ** 2)).tolist(), rel=1e-6
    )
    assert found[0, 4] == 0


def test_the_random_choice_keeps_to_the_band_and_the_fraction() -> None:
    covariances = torch.tensor([[0.5, 1.5, 2.5, 9.0, 3.0], [2.0, 1.0, 4.0, 0.1, 1.2]])
    noise = torch.tensor([[0.9, 0.8, 0.1, 0.0, 0.0], [0.2, 0.3, 0.7, 0.0, 0.6]])
    chosen = select_clip_cov(covariances, noise, MASK, fraction=2 / 9)
    assert chosen.nonzero().tolist() == [[0, 2], [1, 0]]
    assert not select_clip_cov(covariances, noise, MASK, fraction=0.0).any()


def test_the_largest_covariances_are_chosen() -> None:
    covariances = torch.tensor([[0.5, 1.5, 2.5, 9.0, 99.0], [2.0, 1.0, 4.0, 0.1, 1.2]])
    assert select_kl_cov(covariances, MASK, fraction=2 / 9).nonzero().tolist() == [[0, 3], [1, 2]]


def test_a_small_share_of_few_tokens_still_chooses_one() -> None:
    """2e-4 of nine tokens is less than one, and 0.3 of them is 2.7, rounded down."""
    covariances = torch.tensor([[0.5, 1.5, 2.5, 9.0, 99.0], [2.0, 1.0, 4.0, 0.1, 1.2]])
    noise = torch.arange(10.0).reshape(2, 5)
    assert select_kl_cov(covariances, MASK).nonzero().tolist() == [[0, 3]]
    assert select_clip_cov(covariances, noise, MASK).nonzero().tolist() == [[0, 1]]
    assert select_kl_cov(covariances, MASK, fraction=0.3).sum() == 2
    assert not select_kl_cov(covariances, MASK, fraction=0.0).any()
    assert not select_kl_cov(covariances, torch.zeros_like(MASK)).any()


def test_the_band_of_the_random_choice_leaves_its_bounds_out() -> None:
    covariances = torch.tensor([[1.0, 5.0, 1.01, 4.99, 3.0], [0.0] * 5])
    chosen = select_clip_cov(covariances, torch.zeros(2, 5), MASK, fraction=1.0)
    assert chosen.nonzero().tolist() == [[0, 2], [0, 3]]


def test_the_entropy_quantile_is_the_rows_own() -> None:
    entropy = torch.tensor([[1.0, 2, 3, 4, NAN], [10, 20, 30, 40, 50]])
    assert above_row_quantile(entropy, MASK, quantile=0.8).nonzero().tolist() == [[0, 3], [1, 4]]
    assert not above_row_quantile(entropy, torch.zeros_like(MASK)).any()


def test_the_router_shift_of_two_layers() -> None:
    """Mean deviations .05 and .30 of the two layers: gamma = exp(-.175) = .839457; identical
    routers give 1.
    """
    old = torch.zeros(1, 2, 2, 2, dtype=torch.float64)
    now = old + f64([[0.05, -0.05], [0.3, -0.3]])
    mask = torch.tensor([[True, False]])
    assert router_shift(now, old, mask).tolist()[0] == pytest.approx([0.839457, 1.0], abs=1e-6)
    assert router_shift(old, old, mask).tolist() == [[1, 1]]
    assert router_shift(now * 9, old, mask)[0, 0] == 0.8


def test_the_interpolated_anchor_keeps_the_full_ratio_as_a_product() -> None:
    """E9: lag 2, alpha .5: r = c = [1.161834, .818731, 1.568312]; lags 1, 2, 3, 4 give alpha 0,
    1/2, 2/3, 3/4.
    """
    rollout, logprobs = f64([[-1.2, -0.7, -2]]), f64([[-0.9, -1.1, -1.1]])
    mask, versions = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[3, 3, 3]])
    anchor = interpolated_anchor(logprobs, rollout, 5 - versions, mask)
    assert (logprobs - anchor).exp().tolist()[0] == pytest.approx(
        [1.161834, 0.818731, 1.568312], abs=1e-6
    )
    assert (anchor - rollout).exp().tolist()[0] == pytest.approx(
        [1.161834, 0.818731, 1.568312], abs=1e-6
    )
    ones = torch.ones(1, 3, dtype=torch.bool)
    lags = interpolated_anchor(f64([[1.0] * 3]), f64([[0.0] * 3]), torch.tensor([[1, 3, 4]]), ones)
    assert lags.tolist()[0] == pytest.approx([0, 2 / 3, 3 / 4])


def test_decoupled_ppo_learns_where_the_sampler_as_anchor_clips_everything() -> None:
    """E9: three tokens, proximal policy between sampler and current policy."""
    from oxrl.functional import ppo_clip, truncate_weights

    rollout, old = f64([[-1.2, -0.7, -2]]), f64([[-1, -0.8, -1.6]])
    logprobs, advantages = f64([[-0.9, -1.1, -1.1]]).requires_grad_(), f64([[1, -1, 1]])
    mask, ones = torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.float64)
    correction = truncate_weights(old, rollout, mask, correction_max=5.0)
    assert correction.tolist()[0] == pytest.approx([1.221403, 0.904837, 1.491825], abs=1e-6)
    loss, _ = ppo_clip(logprobs, old, advantages, mask, ones, correction=correction)
    assert loss.item() == pytest.approx(-1.349859 + 0.723870 - 1.790190, abs=1e-5)
    assert torch.autograd.grad(loss, logprobs)[0].tolist()[0] == pytest.approx(
        [-1.349859, 0, 0], abs=1e-6
    )
    loss, _ = ppo_clip(logprobs, rollout, advantages, mask, ones)
    assert loss.item() == pytest.approx(-1.2 + 0.8 - 1.2)
    assert torch.autograd.grad(loss, logprobs)[0].abs().max() == 0
    assert math.isfinite(loss.item())
