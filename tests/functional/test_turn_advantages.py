"""Credit by turns of an episode: discounts at their ends, and turns against turns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oxrl.functional.advantages import ADVANTAGES, AdvantageInputs, TurnDecays, gae, varying_scan
from oxrl.functional.group_advantages import group_normalize
from oxrl.functional.part_advantages import turn_normalize


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_scan_with_a_decay_per_position_is_the_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 300, generator=generator, dtype=torch.float64)
    decays = torch.rand(3, 300, generator=generator, dtype=torch.float64).round(decimals=1)
    expected = torch.zeros_like(x)
    following = torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(300)):
        following = x[:, t] + decays[:, t] * following
        expected[:, t] = following
    assert torch.allclose(varying_scan(x, decays), expected, rtol=0, atol=1e-12)
    assert float(decays.min()) == 0.0  # nothing is divided by a product of decays


# Two turns of two tokens, an answer between them, and padding.
MASK = torch.tensor([[False, True, True, False, True, True, False]])
TURNS = torch.tensor([[-1, 0, 0, -1, 1, 1, -1]])


def test_the_discount_of_a_turn_stands_between_its_last_token_and_the_next_turn() -> None:
    rewards = f64([[0, 0, 1, 0, 0, 2, 0]])
    nothing = torch.zeros_like(rewards)
    at_turns = TurnDecays(turns=TURNS, gamma=0.5)
    found, _ = gae(rewards, nothing, MASK, gamma=0.9, at_turns=at_turns)
    last = [2 * 0.9, 2.0]
    first = 1 + 0.5 * last[0]
    assert found[0].tolist() == pytest.approx([0, 0.9 * first, first, 0, *last, 0])


def test_lambda_of_a_turn_and_the_bootstrap_after_it() -> None:
    rewards = f64([[0, 0, 1, 0, 0, 2, 0]])
    values = f64([[9, 0.1, 0.2, 9, 0.3, 0.4, 9]])
    bootstrap = f64([0.7])
    for next_turn, discount in ((True, 0.5), (False, 0.9)):
        at_turns = TurnDecays(
            turns=TURNS, next_turn=torch.tensor([next_turn]), gamma=0.5, trace=0.25
        )
        found, _ = gae(
            rewards, values, MASK, bootstrap, gamma=0.9, gae_lambda=0.8, at_turns=at_turns
        )
        fourth = 2 + discount * 0.7 - 0.4
        third = 0.9 * 0.4 - 0.3 + 0.9 * 0.8 * fourth
        second = 1 + 0.5 * 0.3 - 0.2 + 0.5 * 0.25 * third
        first = 0.9 * 0.2 - 0.1 + 0.9 * 0.8 * second
        expected = [0, first, second, 0, third, fourth, 0]
        assert found[0].tolist() == pytest.approx(expected)


def test_without_values_of_their_own_turns_change_no_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(4, 200, generator=generator) < 0.7
    turns = torch.where(mask, torch.arange(200) // 9, -1)
    values = torch.randn(4, 200, generator=generator)
    given = AdvantageInputs(
        rewards=f64([1, 0, 1, 0]),
        token_rewards=torch.randn(4, 200, generator=generator, dtype=torch.float64),
        response_mask=mask,
        group_ids=torch.tensor([0, 0, 1, 1]),
        values=values,
        bootstrap=values[:, 0],
        truncated=torch.tensor([True, False, True, False]),
    )
    turned = AdvantageInputs(**{**vars(given), "turns": turns})
    for name in ("returns", "whitened_returns", "gae", "gae_length_adaptive"):
        one, _ = ADVANTAGES[name](given)
        other, _ = ADVANTAGES[name](turned)
        assert one.equal(other)


def test_turns_are_compared_with_the_turns_of_their_number() -> None:
    # Three episodes of one prompt with rewards per turn (1, 0), (0, 2) and (3,); one of another.
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    turns = torch.tensor([[0, 0, 1, 1], [0, 1, 1, -1], [0, 0, -1, -1], [0, -1, -1, -1]])
    rewards = f64([[0.5, 0.5, 0, 0], [0, 2, 0, 0], [0, 3, 0, 0], [4, 0, 0, 0]])
    groups = torch.tensor([7, 7, 7, 8])
    found = turn_normalize(rewards, mask, turns, groups, turn_gamma=0.5)
    # To go: (1, 0), (0 + 0.5 * 2, 2), (3,); the mean of the first turns is 5 / 3, of the second 1.
    spread = (4 / 3) ** 0.5
    first = [(g - 5 / 3) / spread for g in (1, 1, 3)]
    second = 1 / 2**0.5
    assert found.tolist() == [
        pytest.approx([first[0], first[0], -second, -second], rel=1e-6),
        pytest.approx([first[1], second, second, 0], rel=1e-6),
        pytest.approx([first[2], first[2], 0, 0], rel=1e-6),
        [0.0] * 4,
    ]


def test_with_one_turn_each_it_is_the_group_z_score() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    rewards = f64([1, 0, 3, 2])
    token_rewards = f64([[0, 1, 0], [0, 0, 0], [3, 0, 0], [0, 0, 0]])
    groups = torch.tensor([1, 1, 1, 1])
    found = turn_normalize(token_rewards, mask, torch.zeros_like(mask).long(), groups)
    expected = group_normalize(rewards[:3], groups[:3])  # an episode without a token has no turn
    assert found[:3, 0].tolist() == pytest.approx(expected.tolist())
    assert not found[3].any()


def test_a_lambda_of_turns_alone_is_enough_for_the_cell() -> None:
    rewards = f64([[0, 0, 1, 0, 0, 2, 0]])
    inputs = AdvantageInputs(
        rewards=f64([3]),
        token_rewards=rewards,
        group_ids=torch.tensor([0]),
        response_mask=MASK,
        values=f64([[9, 0.1, 0.2, 9, 0.3, 0.4, 9]]),
        turns=TURNS,
    )
    found, _ = ADVANTAGES["gae"](
        inputs,
        gamma=1.0,
        gae_lambda=1.0,
        turn_lambda=0.0,
        whiten=False,
        bootstrap_on_truncation=False,
    )
    # Nothing of the second turn reaches the first but the value at its beginning.
    assert found[0].tolist() == pytest.approx([0, 1 + 0.3 - 0.1, 1 + 0.3 - 0.2, 0, 1.7, 1.6, 0])


@pytest.mark.parametrize("cell", ["returns", "whitened_returns"])
def test_a_discount_of_turns_says_nothing_of_rows_without_turns(cell: str) -> None:
    inputs = AdvantageInputs(
        rewards=f64([3]),
        token_rewards=f64([[0, 0, 1, 0, 0, 2, 0]]),
        group_ids=torch.tensor([0]),
        response_mask=MASK,
    )
    found, _ = ADVANTAGES[cell](inputs, gamma=0.9, turn_gamma=0.5)
    plain, _ = ADVANTAGES[cell](inputs, gamma=0.9)
    assert torch.equal(found, plain)


def test_turns_are_not_discounted_unless_that_is_asked_for() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 1]]).bool()
    turns = torch.tensor([[0, 1, 2], [0, 1, 2]])
    rewards = f64([[0, 0, 4], [1, 0, 0]])
    groups = torch.tensor([0, 0])
    found = turn_normalize(rewards, mask, turns, groups)
    # The returns from the first turn on are 4 and 1, from the second 4 and 0.
    for turn in range(3):
        returns = f64([4, 1]) if turn == 0 else f64([4, 0])
        expected = (returns - returns.mean()) / returns.std()
        assert found[:, turn].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    other = turn_normalize(f64([[0, 1, 4], [1, 0, 3]]), mask, turns, torch.tensor([0, 1]))
    assert not other.any()  # alone in a group
    three = turn_normalize(
        f64([[0, 1], [1, 0], [0, 0]]),
        mask.new_ones(3, 2),
        turns.new_tensor([[0, 1]] * 3),
        groups.new_zeros(3),
    )
    firsts = f64([1, 1, 0])
    assert three[:, 0].tolist() == pytest.approx(
        ((firsts - firsts.mean()) / firsts.std()).tolist(), rel=1e-6
    )
