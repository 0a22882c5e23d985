"""What a preference method reads of completions, by hand: sums of log-probabilities, lengths, and how
far the chosen ones have fallen.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from oxrl.data.conversations import Example
from oxrl.data.preferences import Judged
from oxrl.functional.preference_losses import PAIR_LOSSES
from oxrl.recipes.offline_loop import Memory
from oxrl.recipes.preference_batch import (
    BeforeStep,
    kl_baseline,
    standardized_gaps,
    update_moments,
    with_statistics,
)
from oxrl.recipes.preference_objective import PreferenceObjective, displacement
from oxrl.tables.preference import METHODS
from oxrl.types import Output, PreferenceBatch, TokenBatch

NAN = float("nan")
# Two pairs, chosen before rejected: of 3 and 1 tokens, and of 1 and 2, behind a prompt of one.
LENGTHS = [3, 1, 1, 2]
MASK = torch.tensor([[False] + [t < n for t in range(3)] for n in LENGTHS])
LOGPROBS = [[-1.0, -2.0, -4.0], [-3.0], [-0.5], [-1.5, -2.5]]
SUMS = [-7.0, -3.0, -0.5, -4.0]
REF = [-6.0, -3.5, -0.25, -5.0]


def said() -> Tensor:
    found = torch.full(MASK.shape, NAN, dtype=torch.float64)
    found[MASK] = torch.tensor([x for row in LOGPROBS for x in row], dtype=torch.float64)
    return found


def inputs() -> TokenBatch:
    tokens = torch.ones(MASK.shape, dtype=torch.int64)
    return TokenBatch(tokens=tokens, attention_mask=MASK | True, response_mask=MASK)


def batch(weights: tuple[float, float] = (0.5, 0.5), ref: list[float] = REF) -> PreferenceBatch:
    return PreferenceBatch(
        inputs=inputs(),
        ref_logprobs=torch.tensor(ref, dtype=torch.float64),
        loss_weights=torch.tensor(weights, dtype=torch.float64),
    )


def objective(name: str, **numbers: float) -> PreferenceObjective:
    nobody = cast(Any, None)
    return PreferenceObjective(
        method=METHODS[name],
        numbers=numbers,
        mix={},
        policy=nobody,
        moving_reference=None,
        pad_id=0,
    )


@pytest.mark.parametrize("tail_coeff", [0.0, 0.25, 1.0])
def test_behind_the_shorter_completion_of_a_pair_tokens_count_less(tail_coeff: float) -> None:
    """LD-DPO: the shared length is 1 in both pairs, whichever of the two is the longer one."""
    shortened = objective("ld_dpo", tail_coeff=tail_coeff)
    sums, lengths = shortened.sums(Output(logprobs=said()), inputs())
    expected = [-1.0 - 6.0 * tail_coeff, -3.0, -0.5, -1.5 - 2.5 * tail_coeff]
    assert sums.tolist() == pytest.approx(expected)
    assert lengths.tolist() == LENGTHS


def test_the_loss_of_ld_dpo_is_not_that_of_dpo() -> None:
    """DPO of the shortened sums, and DPO itself at a tail that counts in full."""
    output = Output(logprobs=said())
    found, _ = objective("ld_dpo", tail_coeff=0.5, beta=0.3).loss(output, batch())
    plain, _ = objective("dpo", beta=0.3).loss(output, batch())
    whole, _ = objective("ld_dpo", tail_coeff=1.0, beta=0.3).loss(output, batch())
    margins = torch.tensor(
        [(-4.0 + 6.0) - (-3.0 + 3.5), (-0.5 + 0.25) - (-2.75 + 5.0)], dtype=torch.float64
    )
    expected = -torch.nn.functional.logsigmoid(0.3 * margins).mean()
    assert found.item() == pytest.approx(expected.item())
    assert whole.item() == pytest.approx(plain.item())
    assert abs(found.item() - plain.item()) > 0.1


def test_displacement_is_per_token_of_the_chosen_completion() -> None:
    sums = torch.tensor(SUMS, dtype=torch.float64)
    lengths = torch.tensor(LENGTHS)
    first = (-6.0 + 7.0) / 3
    second = (-0.25 + 0.5) / 1
    assert displacement(batch(), sums, lengths).item() == pytest.approx((first + second) / 2)
    # A pair that does not count is not there.
    assert displacement(batch((0.0, 1.0)), sums, lengths).item() == pytest.approx(second)
    assert displacement(batch((0.0, 0.0)), sums, lengths).item() == 0.0
    # Only the chosen ones are asked.
    other = batch(ref=[REF[0], 99.0, REF[2], -99.0])
    assert displacement(other, sums, lengths).item() == pytest.approx((first + second) / 2)
    empty = torch.tensor([0, 1, 1, 2])
    assert displacement(batch((1.0, 0.0)), sums, empty).item() == pytest.approx(1.0)


def test_the_displacement_of_a_step_is_reported_with_its_loss() -> None:
    _, metrics = objective("dpo", beta=0.3).loss(Output(logprobs=said()), batch())
    assert metrics["preference/displacement"].item() == pytest.approx((1 / 3 + 0.25) / 2)


def test_a_mix_adds_the_losses_by_their_weights() -> None:
    output = Output(logprobs=said())
    mixed = PreferenceObjective(
        method=METHODS["dpo"],
        numbers={"beta": 0.3},
        mix={"ipo": 0.25},
        policy=cast(Any, None),
        moving_reference=None,
        pad_id=0,
    )
    sums = torch.tensor(SUMS, dtype=torch.float64)
    ref = torch.tensor(REF, dtype=torch.float64)
    lengths = torch.tensor(LENGTHS)
    given = (sums[0::2], sums[1::2], ref[0::2], ref[1::2], lengths[0::2], lengths[1::2])
    weights = batch().loss_weights
    dpo, _ = PAIR_LOSSES["dpo"](*given, weights, beta=0.3)
    ipo, _ = PAIR_LOSSES["ipo"](*given, weights, **METHODS["ipo"].numbers)
    loss, _ = mixed.loss(output, batch())
    assert loss.item() == pytest.approx((dpo + 0.25 * ipo).item())


class Told:
    """A policy whose completions have LOGPROBS, in the order of the rows that it is shown."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def forward(self, inputs: TokenBatch, want: frozenset[str]) -> Output:
        self.shown = inputs.tokens.tolist()
        found = torch.full(inputs.tokens.shape, NAN, dtype=torch.float64)
        for row, mask in enumerate(inputs.response_mask):
            found[row, mask] = torch.tensor(LOGPROBS[row], dtype=torch.float64)
        return Output(logprobs=found)


def before(name: str, memory: Memory, units: tuple[Judged, ...] = (), **kw: Any) -> BeforeStep:
    told = dataclasses.replace(objective(name, **kw), policy=cast(Any, Told()))
    return BeforeStep(objective=told, batch=batch(), units=units, memory=memory, seed=0)


def test_moments_are_those_of_the_first_batch_and_then_move_by_a_tenth() -> None:
    memory: Memory = {}
    # Mean 2 and 5, deviation (over n) 1 and 2.
    assert update_moments(memory, torch.tensor([1.0, 3.0])) == pytest.approx((2.0, 1.0))
    moved = (0.9 * 2 + 0.1 * 5, 0.9 * 1 + 0.1 * 2)
    assert update_moments(memory, torch.tensor([3.0, 7.0])) == pytest.approx(moved)
    assert (memory["mean"], memory["std"]) == pytest.approx(moved)


def test_gaps_per_token_of_chosen_over_rejected_are_set_against_those_of_the_steps_so_far() -> None:
    """Alpha-DPO: log ratios -1, 0.5, -0.25, 1 over 3, 1, 1, 2 tokens."""
    first, second = -1 / 3 - 0.5, -0.25 - 0.5
    mean, std = (first + second) / 2, (second - first) / 2
    found = standardized_gaps(before("alpha_dpo", {}))
    assert found.tolist() == pytest.approx([-1.0, 1.0])
    # A mean of 1 and a deviation of 2 before move by a tenth.
    moved = (0.9 + 0.1 * mean, 0.9 * 2 + 0.1 * std)
    later = before("alpha_dpo", {"mean": 1.0, "std": 2.0})
    found = standardized_gaps(later)
    assert found.tolist() == pytest.approx([(gap - moved[0]) / moved[1] for gap in (first, second)])


def test_the_baseline_of_kto_is_how_far_mismatched_completions_have_moved_and_not_their_own() -> (
    None
):
    """Completions of 3 and 1 tokens, -7 and -3 nats; the reference says -9 and -4 of them."""
    own = Example(uid="own", token_ids=(1, 8), trained=(False, True))
    other = [
        Example(uid="a", token_ids=(1, 2, 3, 4), trained=(False, True, True, True)),
        Example(uid="b", token_ids=(1, 5), trained=(False, True)),
    ]
    units = tuple(
        Judged(uid=row.uid, rows=(own, row), ref_logprobs=(50.0, ref))
        for row, ref in zip(other, (-9.0, -4.0), strict=True)
    )
    step = before("kto", {}, units, beta=0.1)
    assert kl_baseline(step).item() == pytest.approx((2.0 + 1.0) / 2)
    assert cast(Any, step.objective.policy).shown == [[1, 2, 3, 4], [1, 5, 0, 0]]


def before_step(name: str, seen: PreferenceBatch, **numbers: float) -> BeforeStep:
    found = BeforeStep(
        objective=objective(name, **numbers), batch=seen, units=(), memory={}, seed=0
    )
    squares = torch.full(MASK.shape, NAN, dtype=torch.float64)
    squares[MASK] = torch.tensor([0.5, 0.25, 0.125, 0.3, 0.6, 0.4, 0.2], dtype=torch.float64)
    vars(found)["output"] = Output(logprobs=said(), sum_p_squared=squares)
    return found


def test_wpo_weighs_a_pair_by_how_likely_both_of_its_completions_are() -> None:
    """Per token, against what its place could have been: exp of the mean of log p - log sum p^2."""
    found = with_statistics(before_step("wpo", batch())).extras["pair_weights"]
    squares = [[0.5, 0.25, 0.125], [0.3], [0.6], [0.4, 0.2]]
    rows = [
        math.exp(sum(p - math.log(s) for p, s in zip(row, all_s, strict=True)) / len(row))
        for row, all_s in zip(LOGPROBS, squares, strict=True)
    ]
    assert found.tolist() == pytest.approx([rows[0] * rows[1], rows[2] * rows[3]])
    assert rows[1] != pytest.approx(1) and rows[3] != pytest.approx(1)


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("robustness", [0.5, 2.0])
def test_what_normalizes_dr_dpo_is_of_its_own_losses(beta: float, robustness: float) -> None:
    seen = batch((0.25, 0.75))
    numbers = {"beta": beta, "robustness": robustness}
    found = with_statistics(before_step("dr_dpo", seen, **numbers)).extras["log_mean"]
    ratios = [own - reference for own, reference in zip(SUMS, REF, strict=True)]
    losses = [math.log1p(math.exp(-beta * (ratios[i] - ratios[i + 1]))) for i in (0, 2)]
    mean = 0.25 * math.exp(-losses[0] / robustness) + 0.75 * math.exp(-losses[1] / robustness)
    assert found.item() == pytest.approx(math.log(mean))
