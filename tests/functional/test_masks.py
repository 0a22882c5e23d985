from __future__ import annotations

import pytest
import torch

from oxrl.functional.masks import (
    fill_masked,
    masked_mean,
    masked_sum,
    require_same_shape,
    weighted_sum,
)

NAN = float("nan")


def test_a_mean_skips_masked_positions_even_when_they_hold_nan() -> None:
    x = torch.tensor([[1.0, NAN, 3.0], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert float(masked_mean(x, mask)) == 2.0
    assert masked_mean(x, mask, dim=1).tolist() == [2.0, 0.0]
    assert float(masked_sum(x, mask)) == 4.0


def test_no_gradient_reaches_a_masked_position() -> None:
    x = torch.tensor([1.0, float("inf"), NAN], requires_grad=True)
    mask = torch.tensor([True, False, False])
    fill_masked(x, mask).exp().sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [pytest.approx(2.7182817), 0.0, 0.0]


def test_an_empty_mask_gives_a_zero_that_keeps_its_graph() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    total = weighted_sum(x, torch.tensor([False, False]), torch.ones(2))
    total.backward()
    assert total.item() == 0.0 and x.grad is not None and x.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_raised_and_float64_is_kept(dtype: torch.dtype) -> None:
    mask = torch.ones(3, dtype=torch.bool)
    assert masked_mean(torch.ones(3, dtype=dtype), mask).dtype == torch.float32
    assert masked_mean(torch.ones(3, dtype=torch.float64), mask).dtype == torch.float64


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"advantages has shape \(2,\) but logprobs has shape \(2, 3\)"
    ):
        require_same_shape(logprobs=torch.zeros(2, 3), correction=None, advantages=torch.zeros(2))
