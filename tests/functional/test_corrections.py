"""Example E8: log rho of row 1 is [.1, -.2, .3, 1.2], of row 2 [0, .05, -.1]."""

from __future__ import annotations

import pytest
import torch

from oxrl.functional.corrections import CORRECTIONS, mask_weights, truncate_weights

NAN = float("nan")
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
LOG_RHO = torch.tensor([[0.1, -0.2, 0.3, 1.2], [0, 0.05, -0.1, NAN]], dtype=torch.float64)
ROLLOUT = torch.full((2, 4), -1.0, dtype=torch.float64)
OLD = ROLLOUT + LOG_RHO


def test_token_truncation() -> None:
    expected = [1.105171, 0.818731, 1.349859, 2.0, 1.0, 1.051271, 0.904837]
    assert truncate_weights(OLD, ROLLOUT, MASK)[MASK].tolist() == pytest.approx(expected, abs=1e-6)


def test_sequence_and_geometric_truncation() -> None:
    sequence = truncate_weights(OLD, ROLLOUT, MASK, correction_level="sequence", correction_max=5.0)
    assert sequence[:, 0].tolist() == pytest.approx([4.0552, 0.951229], abs=1e-6)
    assert truncate_weights(OLD, ROLLOUT, MASK, correction_level="sequence")[0].tolist() == [2.0] * 4
    geometric = truncate_weights(OLD, ROLLOUT, MASK, correction_level="geometric")
    assert geometric[:, 0].tolist() == pytest.approx([1.419068, 0.983471], abs=1e-6)


def test_masking_drops_what_lies_outside_the_bounds() -> None:
    weights = mask_weights(OLD, ROLLOUT, MASK, correction_min=0.5, correction_max=2.0)
    assert weights[0].tolist() == pytest.approx([1.105171, 0.818731, 1.349859, 0], abs=1e-6)
    row = mask_weights(OLD, ROLLOUT, MASK, correction_level="geometric", correction_min=0.98, correction_max=1.002)
    assert (row[0] == 0).all() and row[1, :3].tolist() == pytest.approx([0.983471] * 3, abs=1e-6)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_equal_policies_need_no_correction(name: str, level: str) -> None:
    weights = CORRECTIONS[name](OLD, OLD, MASK, correction_level=level)
    assert torch.equal(weights, MASK.double())


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_is_detached_finite_and_zero_on_padding(name: str) -> None:
    old = torch.tensor([[0.0, -500.0, NAN]], requires_grad=True)
    rollout = torch.tensor([[-500.0, 0.0, NAN]])
    weights = CORRECTIONS[name](old, rollout, torch.tensor([[True, True, False]]))
    assert not weights.requires_grad and weights.isfinite().all() and weights[0, 2] == 0
