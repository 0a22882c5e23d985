"""Loss weights against plain Python, with rows and prompts that have no token, and of one token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional.weights import WEIGHTS, length_preference

# Two prompts of three rows, one of a row of one token, one without any token.
LENGTHS = [1, 3, 0, 2, 5, 2, 1, 0]
IDS = [7, 7, 7, 2, 2, 2, 5, 9]
WIDTH = 6
MASK = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]


def check(found: Tensor, by_row: list[float], mask: Tensor = MASK) -> None:
    expected = torch.where(mask, torch.tensor(by_row, dtype=torch.float64)[:, None], 0.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-38)


def of(name: str, mask: Tensor = MASK, ids: list[int] = IDS, **numbers: Any) -> Tensor:
    return WEIGHTS[name](mask, torch.tensor(ids), **numbers)


def test_tokens_rows_and_prompts_count_the_same() -> None:
    check(of("token_mean"), [1 / 14] * 8)
    check(of("sequence_mean"), [1 / (6 * n) if n else 0 for n in LENGTHS])
    check(of("sequence_sum"), [1 / 6] * 8)
    check(of("fixed_length", weights_length=3), [1 / (8 * 3)] * 8)
    tokens = {7: 4, 2: 9, 5: 1, 9: 1}
    check(of("prompt_mean"), [1 / (3 * tokens[i]) for i in IDS])


def test_a_single_token_is_the_whole_batch() -> None:
    mask = torch.tensor([[False, True, False]])
    for name in ("token_mean", "sequence_mean", "sequence_sum", "prompt_mean"):
        assert of(name, mask, [4]).tolist() == [[0.0, 1.0, 0.0]]
    assert of("fixed_length", mask, [4], weights_length=1).tolist() == [[0.0, 1.0, 0.0]]
    assert of("lambda_group", mask, [4], length_power=2.0).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("name", WEIGHTS)
def test_without_a_token_there_is_no_weight(name: str, rows: int) -> None:
    numbers = {"fixed_length": {"weights_length": 4}, "lambda_group": {"length_power": 1.0}}
    mask = torch.zeros(rows, 3, dtype=torch.bool)
    found = of(name, mask, [1] * rows, **numbers.get(name, {}))
    assert found.shape == mask.shape and found.dtype == torch.float32
    assert found.isfinite().all() and not found.any()


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_mask_that_is_not_a_mask_is_refused(name: str) -> None:
    numbers = {"fixed_length": {"weights_length": 4}, "lambda_group": {"length_power": 1.0}}
    for mask in (torch.ones(2, 3), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(ValueError, match="response_mask must be bool"):
            of(name, mask, [1, 1], **numbers.get(name, {}))


@pytest.mark.parametrize("name", ["prompt_mean", "lambda_group"])
def test_every_row_belongs_to_a_prompt(name: str) -> None:
    numbers = {"length_power": 1.0} if name == "lambda_group" else {}
    with pytest.raises(ValueError, match="row_counts has shape"):
        WEIGHTS[name](MASK, torch.tensor([1, 2]), **numbers)


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_below_one_divides_nothing(length: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        of("fixed_length", weights_length=length)


def preference(lengths: list[int], power: float) -> list[float]:
    """G times the softmax of (1 + z / 9) ** power over the rows with a token."""
    real = [n for n in lengths if n]
    if not real:
        return [0.0] * len(lengths)
    mean = sum(real) / len(real)
    std = math.sqrt(sum((n - mean) ** 2 for n in real) / len(real))
    scores = []
    for n in lengths:
        z = (n - mean) / std if std else 0.0
        near = min(max(z / 9, -0.9), 0.9)
        scores.append(math.exp((1 + near) ** power) if n else 0.0)
    return [len(real) * score / sum(scores) for score in scores]


@pytest.mark.parametrize("power", [0.0, 1.0, -1.0, 2.5, -3.0, 40.0])
def test_the_preference_of_a_length(power: float) -> None:
    lengths = torch.tensor(LENGTHS)
    expected = [*preference([1, 3, 0], power), *preference([2, 5, 2], power), 1.0, 0.0]
    found = length_preference(lengths, torch.tensor(IDS), power)
    assert found.tolist() == pytest.approx(expected, rel=1e-9)
    tokens = {7: 4, 2: 9, 5: 1, 9: 1}
    by_row = [f / (3 * tokens[i]) for f, i in zip(expected, IDS, strict=True)]
    check(of("lambda_group", length_power=power), by_row)


@pytest.mark.parametrize("odd", [1, 10_000])
def test_a_row_that_is_nine_deviations_away_is_bounded(odd: int) -> None:
    """One of 200 rows is 14 deviations away from the others: its z / 9 counts as 0.9."""
    lengths = [odd] + [5_000] * 199
    found = length_preference(torch.tensor(lengths), torch.zeros(200, dtype=torch.long), 1.0)
    assert found.tolist() == pytest.approx(preference(lengths, 1.0), rel=1e-9)


def test_rows_of_one_length_are_alike_and_large_powers_do_not_overflow() -> None:
    ids = torch.zeros(3, dtype=torch.long)
    for power in (0.0, 1.0, -500.0, 500.0):
        same = length_preference(torch.tensor([4, 4, 4]), ids, power)
        assert same.tolist() == [1.0, 1.0, 1.0]
    # (1 + 1.22 / 9) ** 60 = 2000 against 1: the longest takes all.
    assert length_preference(torch.tensor([1, 2, 3]), ids, 60.0).tolist() == pytest.approx(
        [0, 0, 3]
    )


def test_the_power_may_be_learned() -> None:
    """Its derivative is that of the formula, by finite differences in float64."""
    lengths = torch.tensor([1, 3, 4])
    ids = torch.zeros(3, dtype=torch.long)
    power = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    for row in range(3):
        found = length_preference(lengths, ids, power)
        (gradient,) = torch.autograd.grad(found[row], power)
        above, below = preference([1, 3, 4], 1.5 + 1e-6), preference([1, 3, 4], 1.5 - 1e-6)
        assert gradient.item() == pytest.approx((above[row] - below[row]) / 2e-6, rel=1e-6)
