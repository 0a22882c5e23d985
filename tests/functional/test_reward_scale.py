"""Rewards on one scale: moments, bounds, and what becomes of rewards of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.functional.shaping import Moments, move_to_scale, scale_rewards
from oxrl.recipes.features.reward_scale import RewardScale
from oxrl.types import RolloutBatch, TokenBatch


def batch(rewards: list[float], greedy: list[float] | None = None) -> RolloutBatch:
    """Rows of 4 tokens, the first of them the prompt; a quarter of the reward is on the second."""
    count = len(rewards)
    of_rows = torch.tensor(rewards, dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True]] * count)
    token_rewards = torch.zeros(count, 4, dtype=torch.float64)
    token_rewards[:, 1] = of_rows / 4
    token_rewards[:, 3] = of_rows * 3 / 4
    tokens = torch.ones(count, 4, dtype=torch.int64)
    inputs = TokenBatch(tokens=tokens, attention_mask=tokens.bool(), response_mask=mask)
    return RolloutBatch(
        inputs=inputs,
        rollout_logprobs=torch.zeros(count, 4),
        rewards=of_rows,
        token_rewards=token_rewards,
        group_ids=torch.arange(count) // 2,
        versions=torch.zeros(count, 4, dtype=torch.int64),
        terminated=torch.ones(count, dtype=torch.bool),
        truncated=torch.zeros(count, dtype=torch.bool),
        valid=torch.ones(count, dtype=torch.bool),
        greedy_rewards=None if greedy is None else torch.tensor(greedy, dtype=torch.float64),
    )


def test_moments_of_pieces_are_those_of_all_values() -> None:
    values = torch.randn(97, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    values += 1000
    seen = Moments()
    for piece in values.split([1, 40, 0, 56]):
        seen = seen.with_values(piece)
    assert seen.count == 97
    assert seen.mean == pytest.approx(float(values.mean()), rel=1e-12)
    assert seen.std == pytest.approx(float(values.std()), rel=1e-9)


def test_rewards_of_a_batch_have_mean_0_and_deviation_1_and_tokens_add_up_to_them() -> None:
    given = batch([1.0, 2.0, 4.0, 9.0], greedy=[4.0, 4.0, 1.0, 1.0])
    found = RewardScale("batch", None).on_rollouts(given)
    assert float(found.rewards.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(found.rewards.std()) == pytest.approx(1.0, rel=1e-5)
    torch.testing.assert_close(found.token_rewards.sum(1), found.rewards)
    # A step keeps its own size: the mean is taken off the last token.
    spread = float(given.rewards.std()) + 1e-6
    torch.testing.assert_close(found.token_rewards[:, 1], given.rewards / 4 / spread)
    assert found.greedy_rewards is not None
    torch.testing.assert_close(found.greedy_rewards[0], found.rewards[2])


def test_running_moments_see_the_batch_first_and_remember_it(tmp_path: Path) -> None:
    scale = RewardScale("running", 1.5)
    scale.on_rollouts(batch([0.0, 0.0, 0.0, 0.0]))
    given = batch([0.0, 0.0, 0.0, 1.0])
    found = scale.on_rollouts(given)
    seen = Moments().with_values(torch.tensor([0.0] * 7 + [1.0]))
    expected = scale_rewards(given.rewards, seen, clip=1.5)
    torch.testing.assert_close(found.rewards, expected)
    assert float(found.rewards[3]) == 1.5 < (1 - seen.mean) / seen.std
    torch.testing.assert_close(found.token_rewards.sum(1), found.rewards)
    metrics: Any = scale.steer(None, None)  # pyright: ignore[reportArgumentType]
    assert metrics["reward/clipped_frac"] == 0.25
    assert metrics["reward/normal_mean"] == 0.125

    scale.save(tmp_path)
    again = RewardScale("running", 1.5)
    again.load(tmp_path)
    more = batch([0.5, 0.25])
    assert torch.equal(again.on_rollouts(more).rewards, scale.on_rollouts(more).rewards)


def test_equal_rewards_and_no_rows_are_no_accident() -> None:
    for how in ("batch", "running"):
        scale = RewardScale(how, None)
        assert scale.on_rollouts(batch([0.1, 0.1, 0.1])).rewards.abs().max() < 1e-9
        assert len(scale.on_rollouts(batch([0.5]).select(torch.tensor([], dtype=torch.int64)))) == 0
    only_bounded = RewardScale("none", 2.0).on_rollouts(batch([-5.0, 1.0, 3.0]))
    assert only_bounded.rewards.tolist() == [-2.0, 1.0, 2.0]
    mask = torch.tensor([[False, False]])
    nothing = move_to_scale(
        torch.zeros(1, 2), mask, torch.ones(1), torch.full((1,), 2.0), moments=None
    )
    assert nothing.tolist() == [[0.0, 0.0]]


def test_what_was_taken_off_is_on_the_last_token_of_a_row_with_gaps() -> None:
    token_rewards = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]])
    mask = torch.tensor([[False, True, False, True, False]])
    rewards = torch.tensor([4.0], dtype=torch.float64)
    moments = Moments(count=3, mean=1.0, squares=8.0)  # a standard deviation of 2
    scaled = scale_rewards(rewards, moments, clip=None)
    assert float(scaled) == pytest.approx(3 / (2 + 1e-6), rel=1e-12)
    found = move_to_scale(token_rewards, mask, rewards, scaled, moments=moments)
    wanted = [0.0, 1 / (2 + 1e-6), 0.0, (3 - 1) / (2 + 1e-6), 0.0]
    assert found[0].tolist() == pytest.approx(wanted, rel=1e-12)


def test_moments_of_fewer_than_two_rewards_have_no_spread() -> None:
    one = Moments().with_values(torch.tensor([5.0]))
    assert (one.count, one.mean, one.squares, one.std) == (1, 5.0, 0.0, 0.0)
    assert Moments().std == 0.0
    assert one.with_values(torch.tensor([7.0])).std == pytest.approx(2**0.5, rel=1e-12)


def test_every_row_has_a_last_token_of_its_own() -> None:
    mask = torch.tensor([[True, True, False, False], [False, True, True, True]])
    token_rewards = torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 6.0, 0.0]])
    scaled = torch.tensor([1.0, 9.0], dtype=torch.float64)
    found = move_to_scale(token_rewards, mask, torch.tensor([2.0, 6.0]), scaled, moments=None)
    assert found.tolist() == [[2.0, -1.0, 0.0, 0.0], [0.0, 0.0, 6.0, 3.0]]


def test_what_was_not_scaled_before_begins_with_nothing_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        RewardScale("running", None).load(tmp_path)
    assert "this begins now" in caplog.text
