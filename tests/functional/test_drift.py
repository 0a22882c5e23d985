"""Drift without chance: policies that are trained by expected updates alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oxrl.functional.centering import Outcomes, score_centering
from oxrl.functional.corrections import truncate_weights
from oxrl.functional.gates import LossInputs, importance_sampling, policy_gradient
from oxrl.functional.masks import LossAndMetrics
from oxrl_proofs import drift


def gate_of(correction: str, tokens: LossInputs) -> LossAndMetrics:
    """What a run would do: its gate, on its ratio, with its correction."""
    given = (tokens.advantages, tokens.mask, tokens.loss_weights)
    if correction == "full":
        return importance_sampling(tokens.logprobs, tokens.sampler, *given)
    weights = None
    if correction == "truncate":
        weights = truncate_weights(tokens.old, tokens.sampler, tokens.mask, correction_max=2.0)
    return policy_gradient(tokens.logprobs, tokens.old, *given, correction=weights)


def by_the_gate(correction: str, *, centered: bool, baseline_off: float) -> list[Tensor]:
    """The expected update of every logit: each prefix and token is a sample that counts by its
    probability, with the mean advantage of the responses that begin so.
    """
    given = drift.policies()
    q = [(a + b).softmax(-1) for a, b in zip(given.logits, given.offset, strict=True)]
    chance = q[0][:, :, None, None] * q[1][:, :, :, None] * q[2]
    middle = (chance * given.rewards).sum((1, 2, 3), keepdim=True)
    advantages = given.rewards - middle + baseline_off
    found: list[Tensor] = []
    for place, logits in enumerate(given.logits):
        begins = chance
        worth = chance * advantages
        while begins.ndim > place + 2:
            begins = begins.sum(-1)
            worth = worth.sum(-1)
        leaf = logits.clone().requires_grad_()
        now = leaf.log_softmax(-1).reshape(-1, 1)
        said = q[place].log().reshape(-1, 1)
        tokens = LossInputs(
            logprobs=now,
            old=now.detach(),
            sampler=said,
            advantages=(worth / begins).reshape(-1, 1),
            mask=torch.ones_like(said, dtype=torch.bool),
            loss_weights=begins.reshape(-1, 1),
        )

        def loss_of(tokens: LossInputs) -> LossAndMetrics:
            return gate_of(correction, tokens)

        if centered:
            # All tokens in the head, and nothing in the tail.
            nothing = torch.full((len(now), 1, 1), -torch.inf, dtype=torch.float64)
            all_now = by_token(leaf.log_softmax(-1), nothing)
            outcomes = Outcomes(
                logprobs=all_now,
                old=all_now.detach(),
                sampler=by_token(q[place].log(), nothing),
                in_head=tokens.mask,
            )
            loss, _ = score_centering(loss_of, tokens, outcomes)
        else:
            loss, _ = loss_of(tokens)
        [gradient] = torch.autograd.grad(loss, leaf)
        found.append(-gradient)
    return found


def by_token(log_p: Tensor, nothing: Tensor) -> Tensor:
    """[N, 1, V + 1]: of each token its whole distribution, and nothing."""
    each = log_p[..., None, :].expand(*log_p.shape, log_p.shape[-1])
    return torch.cat([each.reshape(-1, 1, log_p.shape[-1]), nothing], -1)


@pytest.mark.parametrize("correction", ["none", "truncate", "full"])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("baseline_off", [0.0, -0.5])
def test_the_updates_are_those_of_the_gates(
    correction: str, centered: bool, baseline_off: float
) -> None:
    expected = by_the_gate(correction, centered=centered, baseline_off=baseline_off)
    given = drift.policies()
    found = drift.updates(
        given, correction=correction, centered=centered, baseline_off=baseline_off
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-14
    assert max(float(update.abs().max()) for update in found) > 1e-3


@pytest.mark.parametrize("baseline_off", [-0.5, 0.5])
def test_where_all_responses_are_worth_the_same_only_drift_moves_the_policy(
    baseline_off: float,
) -> None:
    plain = drift.train(rewarded=False, baseline_off=baseline_off)
    centered = drift.train(rewarded=False, baseline_off=baseline_off, centered=True)
    assert plain.largest_last >= plain.largest_first + 1
    assert abs(centered.largest_last - centered.largest_first) < 1e-9


def test_a_baseline_that_is_too_low_costs_reward_without_centering() -> None:
    plain = drift.train(rewarded=True, baseline_off=-0.5)
    centered = drift.train(rewarded=True, baseline_off=-0.5, centered=True)
    assert float(plain.last.mean()) == pytest.approx(0.84, abs=0.01)
    assert float(centered.last.mean()) == pytest.approx(0.94, abs=0.01)


def test_centering_is_no_unbiasedness() -> None:
    """Covariance of advantage and score stays that of the sampler, whatever the baseline is."""
    drifted, right, off = drift.one_place(top=drift.VOCABULARY, tail="event")
    assert drifted < 1e-15
    assert right == pytest.approx(off, rel=1e-9)
    assert right > 0.2


def test_the_tables_are_printed() -> None:
    printed = list(drift.lines(steps=2))
    figures = {line[:27].strip(): float(line[27:36]) for line in printed[2:10]}
    names = [f"none       token, K = {top}" for top in (2, 3, 5)]
    assert [figures[name] for name in names] == [
        pytest.approx(0.047, abs=0.002),
        pytest.approx(0.028, abs=0.002),
        pytest.approx(0.006, abs=0.001),
    ]
