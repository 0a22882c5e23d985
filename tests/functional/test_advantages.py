from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oxrl.functional.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    gae,
    suffix_scan,
    whiten,
)
from oxrl.functional.group_advantages import (
    group_center,
    group_normalize,
    leave_one_out,
)
from oxrl.functional.masks import broadcast

NAN = float("nan")


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- groups ---

ONE_OF_FOUR, SAME = f64([1, 0, 0, 0]), torch.zeros(4, dtype=torch.long)


def test_group_advantages_of_one_success_in_four() -> None:
    """E3: mean .25, unbiased standard deviation .5."""
    normalized = group_normalize(ONE_OF_FOUR, SAME, eps=1e-6)
    torch.testing.assert_close(
        normalized, f64([1.499997, -0.499999, -0.499999, -0.499999]), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(group_center(ONE_OF_FOUR, SAME), f64([0.75, -0.25, -0.25, -0.25]))
    torch.testing.assert_close(leave_one_out(ONE_OF_FOUR, SAME), f64([1, -1 / 3, -1 / 3, -1 / 3]))


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1 / 3])
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("estimate", [group_normalize, group_center, leave_one_out])
def test_a_group_of_equal_rewards_gives_exactly_zero(
    estimate: object, reward: float, size: int
) -> None:
    """In float32 the naive formula gives |A| = 0.41 for eight rewards of 0.1."""
    rewards = torch.full((size,), reward, dtype=torch.float32)
    assert (estimate(rewards, torch.zeros(size, dtype=torch.long)) == 0).all()  # type: ignore[operator]


@pytest.mark.parametrize("estimate", [group_normalize, group_center, leave_one_out])
def test_a_group_of_one_gives_zero(estimate: object) -> None:
    advantages = estimate(f64([5, 1, 0]), torch.tensor([4, 9, 9]))  # type: ignore[operator]
    assert advantages[0] == 0 and advantages[1] > 0


def test_groups_match_a_loop_over_prompts_in_any_row_order() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(24, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 5, (24,), generator=generator) * 100
    expected = torch.zeros_like(rewards)
    for group in ids.unique():
        rows = ids == group
        expected[rows] = (rewards[rows] - rewards[rows].mean()) / (rewards[rows].std() + 1e-8)
    order = torch.randperm(24, generator=generator)
    torch.testing.assert_close(group_normalize(rewards, ids), expected)
    torch.testing.assert_close(group_normalize(rewards[order], ids[order]), expected[order])


def test_normalized_advantages_ignore_an_affine_change_of_rewards() -> None:
    rewards, ids = f64([1, 4, 2, 8]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(group_normalize(3 * rewards + 7, ids), group_normalize(rewards, ids))
    torch.testing.assert_close(group_center(3 * rewards + 7, ids), 3 * group_center(rewards, ids))


@pytest.mark.parametrize(
    ("estimate", "size", "gradient"),
    [(leave_one_out, 2, 0.16), (group_center, 2, 0.08), (group_center, 4, 0.12)],
)
def test_the_baseline_is_unbiased_or_off_by_a_known_factor(
    estimate: object, size: int, gradient: float
) -> None:
    """E3: Bernoulli policy p = .2, reward = action; the true gradient by its logit is p (1 - p) =
    .16.

    A mean that includes the sample itself shrinks the expected gradient by 1 - 1/G; leaving it out
    does not.
    """
    p, expected = 0.2, 0.0
    for actions in itertools.product([0.0, 1.0], repeat=size):
        probability = torch.tensor([p if a else 1 - p for a in actions], dtype=torch.float64).prod()
        advantages = estimate(f64(actions), torch.zeros(size, dtype=torch.long))  # type: ignore[operator]
        expected += float(probability * (advantages * (f64(actions) - p)).mean())
    assert expected == pytest.approx(gradient, abs=1e-9)


def test_an_unscored_row_is_refused_with_its_number() -> None:
    with pytest.raises(ValueError, match=r"rows \[1\] are not finite"):
        group_normalize(f64([1, NAN]), torch.tensor([0, 0]))


def test_a_row_advantage_is_spread_over_its_trained_tokens() -> None:
    mask = torch.tensor([[False, True, True], [True, False, False]])
    assert broadcast(f64([2, -1]), mask).tolist() == [[0, 2, 2], [-1, 0, 0]]


# --- gae ---

REWARDS, VALUES, ALL = (
    f64([[0, 0, 0, 1]]),
    f64([[0.5, 0.6, 0.4, 0.8]]),
    torch.ones(1, 4, dtype=torch.bool),
)


@pytest.mark.parametrize(
    ("gamma", "gae_lambda", "bootstrap", "advantages", "returns"),
    [
        (1.0, 0.95, None, [0.442475, 0.3605, 0.59, 0.2], [0.942475, 0.9605, 0.99, 1.0]),
        (1.0, 1.0, None, [0.5, 0.4, 0.6, 0.2], [1, 1, 1, 1]),
        (1.0, 0.0, None, [0.1, -0.2, 0.4, 0.2], [0.6, 0.4, 0.8, 1]),
        (0.9, 0.95, None, [0.193733, 0.179805, 0.491, 0.2], [0.693733, 0.779805, 0.891, 1]),
        (1.0, 0.95, 0.7, [1.042637, 0.99225, 1.255, 0.9], [1.542637, 1.59225, 1.655, 1.7]),
    ],
)
def test_gae_of_the_worked_example(
    gamma: float,
    gae_lambda: float,
    bootstrap: float | None,
    advantages: list[float],
    returns: list[float],
) -> None:
    """E1; a cut response differs from an ended one by gamma * (gamma * lambda)^(n - k) *
    bootstrap.
    """
    after = None if bootstrap is None else f64([bootstrap])
    found, targets = gae(REWARDS, VALUES, ALL, after, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(found, f64([advantages]), atol=1e-6, rtol=0)
    torch.testing.assert_close(targets, f64([returns]), atol=1e-6, rtol=0)


def test_a_tool_token_is_skipped_not_zeroed() -> None:
    """E1 with mask [1, 0, 1, 1]: .4605; zeroing the masked value instead would give .412475."""
    mask = torch.tensor([[True, False, True, True]])
    values = f64([[0.5, NAN, 0.4, 0.8]])
    advantages, returns = gae(REWARDS, values, mask, gamma=1.0, gae_lambda=0.95)
    torch.testing.assert_close(advantages, f64([[0.4605, 0, 0.59, 0.2]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, f64([[0.9605, 0, 0.99, 1.0]]), atol=1e-6, rtol=0)


def test_a_reward_on_a_tool_token_counts_for_the_action_before_it() -> None:
    mask = torch.tensor([[True, False, True]])
    on_tool, _ = gae(f64([[0, 1, 0]]), f64([[0, 0, 0]]), mask, gamma=0.5)
    on_action, _ = gae(f64([[1, 0, 0]]), f64([[0, 0, 0]]), mask, gamma=0.5)
    assert on_tool.tolist() == on_action.tolist() == [[1, 0, 0]]


def slow_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Schulman et al. 2016, Eq. 16, one row and one token at a time."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for b in range(mask.shape[0]):
        kept = mask[b].nonzero().flatten().tolist()
        following_value, following_advantage = float(bootstrap[b]), 0.0
        for i, t in reversed(list(enumerate(kept))):
            until = kept[i + 1] if i + 1 < len(kept) else mask.shape[1]
            reward = float(rewards[b, t:until].sum())
            delta = reward + gamma * following_value - float(values[b, t])
            following_advantage = delta + gamma * gae_lambda * following_advantage
            following_value = float(values[b, t])
            advantages[b, t], returns[b, t] = (
                following_advantage,
                following_advantage + following_value,
            )
    return advantages, returns


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 257])
def test_vectorised_gae_equals_the_loop(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    rewards = torch.randn(6, length, generator=generator, dtype=torch.float64)
    values = torch.randn(6, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, length, generator=generator) < 0.7
    mask[0] = False
    bootstrap = torch.randn(6, generator=generator, dtype=torch.float64)
    expected = slow_gae(rewards, values, mask, bootstrap, 0.98, 0.95)
    found = gae(rewards, values, mask, bootstrap, gamma=0.98, gae_lambda=0.95)
    torch.testing.assert_close(found[0], expected[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(found[1], expected[1], atol=1e-10, rtol=0)
    per_row = gae(rewards, values, mask, bootstrap, gamma=0.98, gae_lambda=f64([0.95] * 6))
    torch.testing.assert_close(per_row[0], expected[0], atol=1e-10, rtol=0)


def test_padding_with_nan_changes_no_advantage() -> None:
    pad = torch.full((1, 3), NAN, dtype=torch.float64)
    padded = (
        torch.cat([REWARDS, pad], 1),
        torch.cat([VALUES, pad], 1),
        torch.cat([ALL, torch.zeros(1, 3).bool()], 1),
    )
    found, returns = gae(*padded, f64([0.7]), gamma=0.9, gae_lambda=0.9)
    alone = gae(REWARDS, VALUES, ALL, f64([0.7]), gamma=0.9, gae_lambda=0.9)
    assert torch.equal(found[:, :4], alone[0]) and torch.equal(returns[:, :4], alone[1])
    assert (found[:, 4:] == 0).all() and (returns[:, 4:] == 0).all()


def test_a_long_scan_neither_under_nor_overflows() -> None:
    """0.95^8000 underflows; the scan never divides by it. Far from the end y is 1 / (1 - 0.95) =
    20.
    """
    scanned = suffix_scan(torch.ones(1, 8000, dtype=torch.float64), f64([0.95]))
    assert scanned[0, 0] == pytest.approx(20.0) and scanned[0, -1] == 1.0


def test_a_discount_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match="must lie in"):
        gae(REWARDS, VALUES, ALL, gamma=1.5)


def test_whitening_the_worked_example() -> None:
    """E1, first row whitened with unbiased variance."""
    advantages, _ = gae(REWARDS, VALUES, ALL, gamma=1.0, gae_lambda=0.95)
    expected = f64([[0.271792, -0.231928, 1.178305, -1.218169]])
    torch.testing.assert_close(whiten(advantages, ALL), expected, atol=1e-6, rtol=0)


def test_whitening_reads_trained_tokens_only_and_leaves_a_single_one_alone() -> None:
    mask = torch.tensor([[True, True, False]])
    assert whiten(f64([[1, 3, NAN]]), mask).tolist()[0] == pytest.approx(
        [-(0.5**0.5), 0.5**0.5, 0.0]
    )
    assert whiten(f64([[5, 3, NAN]]), torch.tensor([[True, False, False]])).tolist() == [[5, 0, 0]]


def test_whitening_equal_values_does_not_blow_rounding_up() -> None:
    values = torch.full((1, 8), 0.1) + torch.tensor([[1e-9] * 4 + [0.0] * 4])
    assert whiten(values, torch.ones(1, 8, dtype=torch.bool)).abs().max() < 1e-6


# --- one signature for all ---

INPUTS = AdvantageInputs(
    rewards=f64([1, 0]),
    token_rewards=f64([[0, 0, 1], [0, 0, 0]]),
    response_mask=torch.tensor([[False, True, True], [False, True, False]]),
    group_ids=torch.tensor([5, 5]),
    values=f64([[NAN, 0.5, 0.25], [NAN, 0.5, NAN]]),
    bootstrap=f64([0.9, 0.9]),
    truncated=torch.tensor([False, True]),
)
GAE = {"gamma": 1.0, "gae_lambda": 1.0, "whiten": False}


def test_the_bootstrap_counts_for_cut_rows_only_and_only_when_asked() -> None:
    ended, returns = ADVANTAGES["gae"](INPUTS, **GAE, bootstrap_on_truncation=False)
    assert ended.tolist() == [[0, 0.5, 0.75], [0, -0.5, 0]]
    assert returns is not None and returns.tolist() == [[0, 1, 1], [0, 0, 0]]
    cut, _ = ADVANTAGES["gae"](INPUTS, **GAE, bootstrap_on_truncation=True)
    assert cut[0].tolist() == ended[0].tolist() and cut[1, 1].item() == pytest.approx(0.4)


def test_gae_without_a_critic_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="needs values"):
        ADVANTAGES["gae"](replace(INPUTS, values=None), **GAE, bootstrap_on_truncation=False)


@pytest.mark.parametrize("name", ["group_normalize", "group_center", "leave_one_out"])
def test_a_group_advantage_has_no_returns_and_covers_every_trained_token(name: str) -> None:
    advantages, returns = ADVANTAGES[name](INPUTS)
    assert returns is None
    assert torch.equal(advantages != 0, INPUTS.response_mask)
