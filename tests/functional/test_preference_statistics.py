"""Batch statistics and token-level sums that preference losses read, against hand arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oxrl.functional import preference_statistics as statistics

NAN = math.nan


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOGPROBS = torch.tensor(
    [[NAN, -0.5, -0.4, -0.6, NAN], [NAN, -1.0, -0.9, -1.1, -0.5]], dtype=torch.float64
)
MASK = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)


def test_sequence_logprobs_sum_the_trained_tokens_only() -> None:
    sums, lengths = statistics.sequence_logprobs(LOGPROBS, MASK)
    torch.testing.assert_close(sums, f64(-1.5, -3.5))
    assert lengths.tolist() == [3, 4]


def test_length_desensitized_sums_count_the_tail_in_part() -> None:
    """n_min = 3: the chosen row has no tail, the rejected one's last token -.5 counts half: -3 -
    .25.
    """
    shared = torch.tensor([3, 3])
    halved = statistics.length_desensitized_logprobs(LOGPROBS, MASK, shared, tail_coeff=0.5)
    torch.testing.assert_close(halved, f64(-1.5, -3.25))
    whole = statistics.length_desensitized_logprobs(LOGPROBS, MASK, shared, tail_coeff=1.0)
    torch.testing.assert_close(whole, f64(-1.5, -3.5))


def test_length_desensitized_sums_count_trained_tokens_not_positions_across_a_tool_hole() -> None:
    logprobs, mask = f64(-1, -2, -4, -8)[None], torch.tensor([[True, False, True, True]])
    sums = statistics.length_desensitized_logprobs(
        logprobs, mask, torch.tensor([2]), tail_coeff=0.0
    )
    torch.testing.assert_close(sums, f64(-5))


def test_wpo_weights_are_one_where_the_policy_is_uniform() -> None:
    """Uniform over 4: log p = -log 4 and log sum p**2 = -log 4. Elsewhere exp(mean(-1 - log .5, -2
    - log .25)).
    """
    logprobs = torch.tensor(
        [[NAN, -math.log(4), -math.log(4)], [NAN, -1.0, -2.0]], dtype=torch.float64
    )
    squares = torch.tensor([[NAN, 0.25, 0.25], [0.0, 0.5, 0.25]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True], [False, True, True]])
    expected = math.exp((-1 + math.log(2) - 2 + math.log(4)) / 2)
    torch.testing.assert_close(statistics.wpo_weights(logprobs, squares, mask), f64(1, expected))


def test_rank_match_pairs_equal_ranks() -> None:
    assert statistics.rank_match(f64(5, 1, 3), f64(20, 30, 10)).tolist() == [30, 10, 20]
    assert statistics.rank_match(f64(2, 2, 1), f64(1, 2, 3)).tolist() == [2, 3, 1]


def test_the_shift_of_bco_is_the_mean_of_all_rewards_so_far() -> None:
    mean, count = statistics.bco_reward_shift(f64(1, 2, 3), mean=0.0, count=0)
    assert (float(mean), count) == (2.0, 3)
    mean, count = statistics.bco_reward_shift(f64(8), mean=float(mean), count=count)
    assert (float(mean), count) == (3.5, 4)


def test_the_log_mean_of_dr_dpo_skips_pairs_of_weight_zero() -> None:
    losses = f64(0.2, 0.9, math.nan)
    got = statistics.dr_dpo_log_mean(losses, f64(0.5, 0.5, 0), robustness=2.0)
    assert float(got) == pytest.approx(math.log((math.exp(-0.1) + math.exp(-0.45)) / 2), abs=1e-12)


def test_beta_of_beta_dpo_moves_with_the_mean_margin_and_stays_positive() -> None:
    """.1 (1 + .6 (1.5 - .5)) = .16; .1 (1 + .6 (-9.5)) < 0, so 1e-3."""
    assert float(statistics.beta_dpo_beta(f64(1, 2), mean=0.5)) == pytest.approx(0.16)
    assert float(statistics.beta_dpo_beta(f64(-9, -9), mean=0.5)) == pytest.approx(1e-3)


def test_selection_of_beta_dpo_keeps_its_share_and_prefers_typical_margins() -> None:
    generator = torch.Generator().manual_seed(0)
    margins = torch.cat((torch.zeros(8), torch.full((2,), 4.0))).double()
    kept = torch.zeros(10)
    for _ in range(300):
        noise = torch.rand(10, generator=generator).clamp(min=1e-9)
        mask = statistics.beta_dpo_selection(margins, noise, mean=0.0, std=1.0)
        assert int(mask.sum()) == 8
        kept += mask
    # p ~ exp(-8) for the outliers: of 300 draws of 8 among 10, they get in about 300 * 8 * exp(-8)
    # = 1 time each.
    assert kept[:8].min() > 290 and kept[8:].max() < 10


def test_standardize_subtracts_the_mean_and_divides_by_the_deviation() -> None:
    assert statistics.standardize(f64(1, 5), mean=3.0, std=2.0).tolist() == [-1.0, 1.0]
