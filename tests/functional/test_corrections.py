"""Example E8: log rho of row 1 is [.1, -.2, .3, 1.2], of row 2 [0, .05, -.1]."""

from __future__ import annotations

import pytest
import torch

from oxrl.functional.corrections import (
    CORRECTIONS,
    drop_drifted_failures,
    mask_weights,
    reject_k3,
    reject_weights,
    second_moment_mask,
    truncate_weights,
    veto_weights,
)

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
    assert (
        truncate_weights(OLD, ROLLOUT, MASK, correction_level="sequence")[0].tolist() == [2.0] * 4
    )
    geometric = truncate_weights(OLD, ROLLOUT, MASK, correction_level="geometric")
    assert geometric[:, 0].tolist() == pytest.approx([1.419068, 0.983471], abs=1e-6)


def test_masking_drops_what_lies_outside_the_bounds() -> None:
    weights = mask_weights(OLD, ROLLOUT, MASK, correction_min=0.5, correction_max=2.0)
    assert weights[0].tolist() == pytest.approx([1.105171, 0.818731, 1.349859, 0], abs=1e-6)
    row = mask_weights(
        OLD, ROLLOUT, MASK, correction_level="geometric", correction_min=0.98, correction_max=1.002
    )
    assert (row[0] == 0).all() and row[1, :3].tolist() == pytest.approx([0.983471] * 3, abs=1e-6)


def advantages_of(name: str, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"advantages": torch.where(mask, -1.0, NAN)} if name == "drop_drifted_failures" else {}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_equal_policies_need_no_correction(name: str) -> None:
    levels = (
        ("token", "sequence", "geometric") if name in ("truncate", "mask", "reject") else (None,)
    )
    for level in levels:
        numbers = {} if level is None else {"correction_level": level}
        weights = CORRECTIONS[name](OLD, OLD, MASK, **numbers, **advantages_of(name, MASK))
        assert torch.equal(weights.double(), MASK.double())


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_is_detached_finite_and_zero_on_padding(name: str) -> None:
    old = torch.tensor([[0.0, -500.0, NAN]], requires_grad=True)
    rollout = torch.tensor([[-500.0, 0.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    weights = CORRECTIONS[name](old, rollout, mask, **advantages_of(name, mask))
    assert not weights.requires_grad and weights.isfinite().all() and weights[0, 2] == 0


def test_rejection_by_the_geometric_mean_accepts_the_band_on_rho_itself() -> None:
    """E8: the rows' geometric means are 1.419068 and .983471; bounds are on rho, not mirrored as
    for -log rho.
    """
    kept = reject_weights(OLD, ROLLOUT, MASK, correction_min=0.98, correction_max=1.0)
    assert kept.tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]


def test_rejection_by_mean_k3() -> None:
    """E8: mean k3 of the rows is .298469 and .002036."""
    assert reject_k3(OLD, ROLLOUT, MASK).tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]
    assert torch.equal(reject_k3(OLD, ROLLOUT, MASK, correction_k3_max=0.3).double(), MASK.double())


def test_one_impossible_token_spoils_its_row() -> None:
    old = OLD.clone()
    old[0, 2] = -30.0
    assert veto_weights(old, ROLLOUT, MASK).tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]


def test_only_bad_rows_that_drifted_away_are_dropped() -> None:
    drifted = ROLLOUT - 0.6  # the trainer finds these tokens less likely by .6 nats
    advantages = torch.tensor([[-1.0] * 4, [1.0] * 4])
    kept = drop_drifted_failures(drifted, ROLLOUT, MASK, advantages=advantages)
    assert kept.tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]
    near = drop_drifted_failures(ROLLOUT - 0.4, ROLLOUT, MASK, advantages=advantages)
    assert torch.equal(near.double(), MASK.double())


def test_the_drift_carries_no_gradient_and_a_token_of_no_advantage_is_kept() -> None:
    logprobs = (ROLLOUT - 0.6).requires_grad_()
    advantages = torch.tensor([[-1.0, 0.0, 1.0, -2.0], [0.0] * 4])
    kept = drop_drifted_failures(logprobs, ROLLOUT, MASK, advantages=advantages)
    assert kept.tolist() == [[0, 1, 1, 0], [1, 1, 1, 0]] and not kept.requires_grad


def test_the_second_moment_mask_drops_the_largest_until_the_mean_is_small() -> None:
    """Squares .01 .04 .09 1.44 | 0 .0025 .01: without 1.44 the mean is .1525 / 6 = .0254, with it
    .2275.
    """
    weights = second_moment_mask(OLD, ROLLOUT, MASK, second_moment_max=0.04)
    assert weights.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert second_moment_mask(OLD - 9, ROLLOUT, MASK).sum() == 1
