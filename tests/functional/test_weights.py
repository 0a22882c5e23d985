"""Example E4: rows of token losses [4], [1, 2], [2, 2, 5], so N = 6 and the row sums are 4, 3,
9.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oxrl.functional.weights import (
    WEIGHTS,
    fixed_length,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
)

LOSSES = torch.tensor([[4.0, 0, 0], [1, 2, 0], [2, 2, 5]], dtype=torch.float64)
MASK = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
EMPTY = torch.zeros(1, 3, dtype=torch.bool)
IDS = torch.tensor([7, 7, 3])
NUMBERS: dict[str, dict[str, Any]] = {
    "fixed_length": {"weights_length": 4},
    "lambda_group": {"length_power": 1.0},
}


def total(weights: torch.Tensor) -> float:
    return float((LOSSES * weights[:3]).sum())


def test_token_mean_divides_by_the_tokens_of_the_batch() -> None:
    assert total(token_mean(MASK)) == pytest.approx(16 / 6, abs=1e-6)


def test_sequence_mean_averages_the_means_of_rows() -> None:
    assert total(sequence_mean(MASK)) == pytest.approx((4 + 1.5 + 3) / 3, abs=1e-6)


def test_sequence_sum_averages_the_sums_of_rows() -> None:
    assert total(sequence_sum(MASK)) == pytest.approx(16 / 3, abs=1e-6)


def test_fixed_length_divides_by_a_constant() -> None:
    assert total(fixed_length(MASK, weights_length=4)) == pytest.approx(16 / 12, abs=1e-6)


def test_prompt_mean_averages_the_token_means_of_prompts() -> None:
    # prompt 7 holds rows 0 and 1: 7 over 3 tokens; prompt 3 holds row 2: 9 over 3 tokens
    assert total(prompt_mean(MASK, IDS)) == pytest.approx((7 / 3 + 9 / 3) / 2, abs=1e-6)


def test_an_empty_row_changes_nothing_but_the_row_count_of_fixed_length() -> None:
    with_empty = torch.cat([MASK, EMPTY])
    assert total(token_mean(with_empty)) == pytest.approx(16 / 6, abs=1e-6)
    assert total(sequence_mean(with_empty)) == pytest.approx(8.5 / 3, abs=1e-6)
    assert total(sequence_sum(with_empty)) == pytest.approx(16 / 3, abs=1e-6)
    assert total(prompt_mean(with_empty, torch.tensor([7, 7, 3, 9]))) == pytest.approx(
        8 / 3, abs=1e-6
    )
    assert total(fixed_length(with_empty, weights_length=4)) == pytest.approx(16 / 16, abs=1e-6)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_batch_without_trained_tokens_has_finite_zero_weights(name: str) -> None:
    weights = WEIGHTS[name](EMPTY, torch.tensor([0]), **NUMBERS.get(name, {}))
    assert weights.dtype == torch.float32 and weights.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_zero_outside_the_mask(name: str) -> None:
    assert (WEIGHTS[name](MASK, IDS, **NUMBERS.get(name, {}))[~MASK] == 0).all()


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="weights_length must be at least 1, got 0"):
        fixed_length(MASK, weights_length=0)


def test_a_mask_that_is_not_boolean_is_refused() -> None:
    with pytest.raises(ValueError, match="must be bool"):
        token_mean(MASK.float())
