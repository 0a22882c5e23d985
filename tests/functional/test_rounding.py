"""Stochastic rounding: on average it rounds nothing away."""

from __future__ import annotations

import pytest
import torch

from oxrl.functional.rounding import round_stochastically


def every_noise() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32)


@pytest.mark.parametrize(
    "value", [1.001, -1.001, 3.14159, -2.5e-8, 1e30, 1.0, 0.0, -0.75, 2.0**-130]
)
def test_the_mean_over_all_noise_is_the_value(value: float) -> None:
    """With each of the 2^16 numbers once this is the expectation, not an estimate of it."""
    exact = torch.tensor(value, dtype=torch.float32)
    noise = every_noise()
    rounded = round_stochastically(exact.expand(noise.shape), noise).double()
    assert rounded.mean().item() == pytest.approx(exact.item(), rel=1e-12, abs=0.0)
    below, above = rounded.min(), rounded.max()
    gap = abs(above - below).item()
    assert len(rounded.unique()) <= 2 and gap <= abs(exact.item()) * 2**-7


def test_a_bfloat16_stays_what_it_is() -> None:
    noise = torch.randint(1 << 16, (4096,), dtype=torch.int32)
    held = torch.randn(4096).to(torch.bfloat16)
    assert torch.equal(round_stochastically(held.float(), noise), held)


def test_what_is_no_number_stays_so() -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan])
    rounded = round_stochastically(values, torch.full((3,), (1 << 16) - 1, dtype=torch.int32))
    assert rounded[:2].tolist() == [torch.inf, -torch.inf] and rounded[2].isnan()


@pytest.mark.parametrize(
    ("values", "noise", "said"),
    [
        (torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int32), "float64"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), "int64"),
        (torch.zeros(2), torch.zeros(3, dtype=torch.int32), r"\(3,\)"),
    ],
)
def test_other_types_and_shapes_are_refused(
    values: torch.Tensor, noise: torch.Tensor, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        round_stochastically(values, noise)


@pytest.mark.parametrize("added", [0, 1, (1 << 15) - 1, 1 << 15, (1 << 16) - 1])
def test_the_bits_that_are_dropped_carry_and_leave_nothing_behind(added: int) -> None:
    """In whole numbers: the upper half of the float32's bits, one more where the lower half and the
    noise carry.
    """
    lower = torch.arange(0, 1 << 16, 257, dtype=torch.int32)
    for upper in (0x3F81, 0x3F80, 0x4123):  # an odd last bit, and even ones
        values = (lower + (upper << 16)).view(torch.float32)
        found = round_stochastically(values, torch.full_like(lower, added))
        expected = upper + ((lower + added) >> 16)
        assert torch.equal(found.view(torch.int16).int(), expected)
