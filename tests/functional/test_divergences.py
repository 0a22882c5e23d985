"""Divergences from a teacher by enumeration: every token of a small vocabulary, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from oxrl.functional.divergences import (
    Candidates,
    divergence_of,
    estimated_divergence,
)

ALPHAS = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
F64 = torch.float64


class State(NamedTuple):
    """Logits of the policy, log-probabilities of the teacher and of the sampler, and K."""

    logits: Tensor
    teacher: Tensor
    sampler: Tensor
    candidates: list[int]


def states(dtype: torch.dtype = F64) -> Iterator[State]:
    """Vocabularies of 5 to 7, no, one, three and all candidates of either model or of none, on and
    off policy.
    """
    generator = torch.Generator().manual_seed(5)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=F64).to(dtype)

    for vocabulary, count in itertools.product((5, 6, 7), (0, 1, 3, 7)):
        size = min(count, vocabulary)
        logits = normal(vocabulary)
        teacher = (1.5 * normal(vocabulary)).log_softmax(0)
        policy = logits.log_softmax(0)
        elsewhere = (logits + 0.7 * normal(vocabulary)).log_softmax(0)
        random = torch.randperm(vocabulary, generator=generator)
        for ids in (policy.topk(size).indices, teacher.topk(size).indices, random[:size]):
            for sampler in (policy, elsewhere):
                yield State(logits, teacher, sampler, ids.tolist())


def whole(alpha: float, logits: Tensor, teacher: Tensor) -> Tensor:
    """The divergence over the whole vocabulary, as its definition has it."""
    policy = logits.log_softmax(0)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one.exp() * (one - other)).sum()

    if alpha == 1:
        return kl(policy, teacher)
    if alpha == 0:
        return kl(teacher, policy)
    mixture = ((1 - alpha) * policy.exp() + alpha * teacher.exp()).log()
    return alpha * kl(teacher, mixture) + (1 - alpha) * kl(policy, mixture)


def gradient(of: Tensor, by: Tensor) -> Tensor:
    [found] = torch.autograd.grad(of, by, retain_graph=True)
    return found


def estimates(alpha: float, state: State, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Value and push of every token that may be sampled, a row of one position each: [V] both."""
    policy = logits.log_softmax(0)
    count = len(policy)
    ids = torch.tensor(state.candidates, dtype=torch.long)
    found = estimated_divergence(
        divergence_of(alpha),
        policy[:, None],
        state.sampler[:, None],
        state.teacher[:, None],
        Candidates(
            logprobs=policy[ids].expand(count, 1, -1),
            teacher=state.teacher[ids].expand(count, 1, -1),
            has_sampled=torch.isin(torch.arange(count), ids)[:, None],
        ),
        torch.ones(count, 1, dtype=torch.bool),
    )
    return found.value[:, 0], found.push[:, 0]


def expected_gradient(push: Tensor, sampler: Tensor, logits: Tensor) -> Tensor:
    parts = [p * gradient(one, logits) for p, one in zip(sampler.exp(), push, strict=True)]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_value_and_gradient_have_the_mean_of_the_whole_divergence(alpha: float) -> None:
    for state in states():
        logits = state.logits.clone().requires_grad_()
        full = whole(alpha, logits, state.teacher)
        value, push = estimates(alpha, state, logits)
        assert push.eq(0).all()
        assert (state.sampler.exp() * value).sum().item() == pytest.approx(full.item(), abs=1e-10)
        found = expected_gradient(push, state.sampler, logits)
        torch.testing.assert_close(found, gradient(full, logits), rtol=0, atol=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-12), (torch.float32, 1e-6)])
def test_no_single_sample_moves_a_policy_that_is_its_teacher(
    alpha: float, dtype: torch.dtype, bound: float
) -> None:
    for state in states(dtype):
        logits = state.logits.clone().requires_grad_()
        same = state._replace(teacher=logits.detach().log_softmax(0))
        value, push = estimates(alpha, same, logits)
        assert value.abs().max() < bound
        for one in push:
            assert gradient(one, logits).abs().max() < bound


@pytest.mark.parametrize("alpha", ALPHAS)
def test_with_all_tokens_as_candidates_every_sample_gives_the_whole_divergence(
    alpha: float,
) -> None:
    for state in states():
        if len(state.candidates) < len(state.logits):
            continue
        logits = state.logits.clone().requires_grad_()
        full = whole(alpha, logits, state.teacher)
        value, push = estimates(alpha, state, logits)
        torch.testing.assert_close(value, full.detach().expand_as(value), rtol=0, atol=1e-12)
        for one in push:
            expected = gradient(full, logits)
            torch.testing.assert_close(gradient(one, logits), expected, rtol=0, atol=1e-12)


def test_a_divergence_between_the_kls_goes_to_them_at_its_ends() -> None:
    for state in states():
        teacher = (state.teacher / 3).log_softmax(0)
        kls = {alpha: whole(alpha, state.logits, teacher).item() for alpha in (0, 1)}
        for alpha, end in ((0.001, 0), (0.999, 1)):
            near = whole(alpha, state.logits, teacher).item() / (alpha * (1 - alpha))
            assert near == pytest.approx(kls[end], rel=0.01)


@pytest.mark.parametrize("alpha", [-0.5, 1e-9, 0.0099, 0.9901, 1.5, math.nan])
def test_what_is_no_divergence_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="no Jensen-Shannon divergence"):
        divergence_of(alpha)


Rule = Callable[[Tensor, State], Tensor]


def truncated(logits: Tensor, state: State) -> Tensor:
    policy = logits.log_softmax(0)
    return (policy.exp() * (policy - state.teacher))[state.candidates].sum()


def renormalised(logits: Tensor, state: State) -> Tensor:
    policy = logits.log_softmax(0)[state.candidates].log_softmax(0)
    teacher = state.teacher[state.candidates].log_softmax(0)
    return (policy.exp() * (policy - teacher)).sum()


def tail_bucket(logits: Tensor, state: State) -> Tensor:
    policy = logits.log_softmax(0)
    rest = 1 - policy[state.candidates].exp().sum()
    teacher_rest = 1 - state.teacher[state.candidates].exp().sum()
    return truncated(logits, state) + rest * (rest.log() - teacher_rest.log())


@pytest.mark.parametrize("rule", [truncated, renormalised, tail_bucket])
def test_a_common_choice_is_off_where_this_one_is_not(rule: Rule) -> None:
    """The check above can fail: it does for each of them, at nearly every state."""
    off: list[float] = []
    for state in states():
        if not 0 < len(state.candidates) < len(state.logits) - 1:
            continue
        logits = state.logits.clone().requires_grad_()
        expected = gradient(whole(1.0, logits, state.teacher), logits)
        found = gradient(rule(logits, state), logits)
        off.append(((found - expected).norm() / expected.norm()).item())
    assert sorted(off)[len(off) // 20] > 0.01


def test_what_is_masked_is_not_read() -> None:
    nan = torch.full((1, 2), math.nan)
    own = nan.clone()
    own[0, 0] = -1.5
    own.requires_grad_()
    heads = torch.full((1, 2, 3), math.nan)
    heads[0, 0] = torch.tensor([-1.0, -2.0, -3.0])
    heads.requires_grad_()
    teacher = heads.detach() - 0.25
    mask = torch.tensor([[True, False]])
    for alpha in ALPHAS:
        found = estimated_divergence(
            divergence_of(alpha),
            own,
            own.detach(),
            own.detach() - 0.5,
            Candidates(heads, teacher, torch.zeros(1, 2, dtype=torch.bool)),
            mask,
        )
        assert found.value[0, 1] == 0
        assert found.value[0, 0] != 0
        for by in (own, heads):
            moved = gradient(found.push.sum(), by)
            assert moved[0, 0].abs().min() > 0
            assert moved[0, 1].eq(0).all()


def test_shapes_that_differ_are_refused_by_name() -> None:
    two = torch.zeros(1, 2)
    mask = two.bool()
    heads = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="teacher_logprobs has shape"):
        estimated_divergence(
            divergence_of(1), two, two, torch.zeros(1, 3), Candidates(heads, heads, mask), mask
        )
    with pytest.raises(ValueError, match="teacher has shape"):
        estimated_divergence(
            divergence_of(1), two, two, two, Candidates(heads, torch.zeros(1, 2, 4), mask), mask
        )
