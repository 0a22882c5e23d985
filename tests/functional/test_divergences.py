"""Divergences from a teacher by enumeration, in float64: every token of a small vocabulary that may
be sampled, and every sequence of two. A row that is called exact has the gradient and the value of
what its entry names; what is called biased has not.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from oxrl.functional.advantages import ADVANTAGES
from oxrl.functional.divergences import divergence_of
from oxrl.functional.group_advantages import AdvantageInputs
from oxrl.functional.policy_losses import GATES
from oxrl.functional.ratios import RATIOS
from oxrl.tables.policy import ROWS

ALPHAS = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
RESTS = ("truncated", "renormalised", "tail_bucket")
# Rows whose loss is an estimate of a divergence, and called exact.
OF_DIVERGENCES = [name for name, row in ROWS.items() if row.gate == "teacher_divergence"]
RECORDED = Path(__file__).parent / "recorded_of_others.json"
F64 = torch.float64
NAN = math.nan


class State(NamedTuple):
    """[V] logits of the policy, log-probabilities of the teacher and of the sampler, and K."""

    logits: Tensor
    teacher: Tensor
    sampler: Tensor
    candidates: Tensor


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
                yield State(logits, teacher, sampler, ids)


def between(values: Tensor, filler: float = NAN) -> Tensor:
    """[V, 3, ...]: a position of each row between one of the prompt and one of padding."""
    nothing = torch.full_like(values, filler)
    return torch.stack([nothing, values, nothing], 1)


class Samples(NamedTuple):
    """Value [V] and gradient by the logits [V, V] of each token that may be sampled."""

    values: Tensor
    gradients: Tensor


def every_sample(state: State, absent: int = 0, **numbers: Any) -> Samples:
    """The gate's loss of rows of one token, one for each that may be sampled.

    Args:
        state: before that token.
        absent: places of candidates that the teacher has not told.
        numbers: of the gate.
    """
    size = len(state.logits)
    # Each row has logits of its own, so that a gradient tells them apart; and a loss weight.
    logits = state.logits.expand(size, size).clone().requires_grad_()
    weights = torch.ones(size, dtype=state.logits.dtype, requires_grad=True)
    policy = logits.log_softmax(1)
    ids = torch.cat([state.candidates, torch.arange(absent)])
    told = torch.cat([state.teacher[state.candidates], torch.full((absent,), NAN)])
    loss, metrics = GATES["teacher_divergence"](
        between(policy.diagonal()),
        between(state.sampler),
        between(torch.full((size,), NAN)),
        between(torch.ones(size, dtype=torch.bool), False),
        between(weights),
        top_logprobs=between(policy[:, ids]),
        teacher_top_logprobs=between(told.to(state.teacher.dtype).expand(size, -1), -1.0),
        teacher_logprobs=between(state.teacher),
        sampled_in_top=between(torch.isin(torch.arange(size), state.candidates), False),
        **numbers,
    )
    # The loss is linear in its weights: its slope by one is the value of that row.
    gradients, values = torch.autograd.grad(loss, [logits, weights])
    if "correction" not in numbers:
        told_value = metrics["teacher/divergence"].item()
        assert told_value == pytest.approx(values.mean().item(), rel=1e-5, abs=1e-6)
    known = state.logits.softmax(0)[state.candidates].sum().item()
    assert metrics["teacher/mass"].item() == pytest.approx(known, abs=1e-6)
    return Samples(values, gradients)


def whole(alpha: float, logits: Tensor, teacher: Tensor) -> Tensor:
    """The divergence over the whole vocabulary, as its definition has it."""
    policy = logits.log_softmax(-1)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one.exp() * (one - other)).sum(-1)

    if alpha == 1:
        return kl(policy, teacher)
    if alpha == 0:
        return kl(teacher, policy)
    mixture = ((1 - alpha) * policy.exp() + alpha * teacher.exp()).log()
    return alpha * kl(teacher, mixture) + (1 - alpha) * kl(policy, mixture)


def slope(function: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    """A number and its gradient by logits."""
    at = logits.clone().requires_grad_()
    value = function(at)
    return value.detach(), torch.autograd.grad(value, at)[0]


def far(found: Tensor, expected: Tensor) -> float:
    """How far a gradient is from another, as a share of it."""
    return float((found - expected).norm() / expected.norm())


def close(found: Tensor, expected: Tensor, by: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=by)


# --- opd_topk, opsd, sdpo, prompt_distil: the divergence of every state


@pytest.mark.parametrize("name", OF_DIVERGENCES)
def test_these_rows_estimate_a_divergence_that_is_enumerated_here(name: str) -> None:
    row = ROWS[name]
    assert (row.advantage, row.ratio, row.denominator) == ("none", "token", "rollout")
    assert (row.correction, row.kl) == ("none", "none")
    assert row.defaults["candidates_rest"] == "sampled"
    assert row.defaults["divergence_alpha"] in ALPHAS


@pytest.mark.parametrize("alpha", ALPHAS)
def test_value_and_gradient_have_the_mean_of_the_whole_divergence(alpha: float) -> None:
    for state in states():
        found = every_sample(state, divergence_alpha=alpha)
        full, gradient = slope(lambda at, s=state: whole(alpha, at, s.teacher), state.logits)
        chances = state.sampler.exp()
        close((chances * found.values).sum(), full)
        close((chances[:, None] * found.gradients).sum(0), gradient)
        if len(state.candidates) == len(state.logits):
            # Nothing is left to chance.
            close(found.values, full.expand_as(found.values), 1e-12)
            close(found.gradients, gradient.expand_as(found.gradients), 1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-12), (torch.float32, 1e-6)])
def test_no_single_sample_moves_a_policy_that_is_its_teacher(
    alpha: float, dtype: torch.dtype, bound: float
) -> None:
    for state in states(dtype):
        same = state._replace(teacher=state.logits.log_softmax(0))
        found = every_sample(same, divergence_alpha=alpha)
        assert found.values.abs().max() < bound
        assert found.gradients.abs().max() < bound


def test_candidates_that_the_teacher_has_not_told_add_nothing() -> None:
    for rest, state in itertools.product(("sampled", *RESTS), states()):
        if not len(state.candidates):
            continue  # nothing would be left without a sampled token
        numbers = {"divergence_alpha": 0.5, "candidates_rest": rest}
        plain = every_sample(state, **numbers)
        padded = every_sample(state, absent=2, **numbers)
        close(padded.values, plain.values, 1e-13)
        close(padded.gradients, plain.gradients, 1e-13)


def slopes(of: Tensor, by: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(of, by, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("rest", ["sampled", *RESTS])
def test_positions_one_by_one_add_up_to_those_of_a_batch(rest: str) -> None:
    generator = torch.Generator().manual_seed(8)

    def logs(*shape: int) -> Tensor:
        return torch.randn(4, 6, *shape, generator=generator, dtype=F64) - 3

    mask = torch.rand(4, 6, generator=generator) < 0.7
    # What is not trained on is not read, whatever the teacher has told of it.
    factor = torch.where(mask, logs(), NAN)
    own = torch.where(mask, logs(), NAN).requires_grad_()
    top = torch.where(mask[..., None], logs(3), NAN).requires_grad_()
    given = [own, logs(), logs(), mask, logs()]
    further = {
        "top_logprobs": top,
        "teacher_top_logprobs": logs(3),
        "teacher_logprobs": logs(),
        "sampled_in_top": torch.rand(4, 6, generator=generator) < 0.5,
        "correction": factor,
    }

    def of(rows: slice, columns: slice) -> Tensor:
        part = {name: tensor[rows, columns] for name, tensor in further.items()}
        tensors = [tensor[rows, columns] for tensor in given]
        return GATES["teacher_divergence"](*tensors, candidates_rest=rest, **part)[0]

    at_once = of(slice(None), slice(None))
    expected = slopes(at_once, [own, top])
    for size in (1, 4):
        pieces = [
            of(slice(row, row + 1), slice(start, start + size))
            for row in range(4)
            for start in range(0, 6, size)
        ]
        total = torch.stack(pieces).sum()
        close(total, at_once, 1e-12)
        for found, wanted in zip(slopes(total, [own, top]), expected, strict=True):
            close(found, wanted, 1e-12)
            assert wanted[~mask].eq(0).all()


def test_a_correction_is_a_factor() -> None:
    for state in states():
        factors = torch.linspace(0.5, 2, len(state.logits), dtype=F64)
        plain = every_sample(state, divergence_alpha=0.5)
        found = every_sample(state, divergence_alpha=0.5, correction=between(factors))
        close(found.values, plain.values * factors, 1e-12)
        close(found.gradients, plain.gradients * factors[:, None], 1e-12)


def test_only_the_policy_is_pushed() -> None:
    """Whatever else has a gradient, and metrics have none."""

    def leaf(*shape: int) -> Tensor:
        return torch.full(shape, -1.0, requires_grad=True)

    mask = torch.ones(1, 2, dtype=torch.bool)
    policy = {"logprobs": leaf(1, 2), "top_logprobs": leaf(1, 2, 3)}
    others = {
        "old_logprobs": leaf(1, 2),
        "advantages": leaf(1, 2),
        "teacher_top_logprobs": leaf(1, 2, 3),
        "teacher_logprobs": leaf(1, 2),
        "correction": leaf(1, 2),
    }
    further = {"mask": mask, "loss_weights": torch.ones(1, 2), "sampled_in_top": ~mask}
    loss, metrics = GATES["teacher_divergence"](**policy, **others, **further)
    loss.backward()
    assert all(tensor.grad is not None for tensor in policy.values())
    assert all(tensor.grad is None for tensor in others.values())
    assert not any(metric.requires_grad for metric in metrics.values())


def test_sampled_tokens_that_were_next_to_impossible_are_bounded() -> None:
    """In float32, where 1 / mu would be infinite: as if mu were exp(-80), and the ratio exp(20)."""
    own = torch.tensor([[-1.0]], requires_grad=True)
    one = torch.ones(1, 1)
    empty = torch.zeros(1, 1, 0)
    for mu, inverse, bounded in ((-200.0, 80.0, True), (-85.0, 80.0, True), (-20.0, 20.0, False)):
        loss, _ = GATES["teacher_divergence"](
            own,
            one * mu,
            one,
            one.bool(),
            one,
            top_logprobs=empty,
            teacher_top_logprobs=empty,
            teacher_logprobs=one * -2,
            sampled_in_top=~one.bool(),
        )
        assert loss.item() == pytest.approx(math.exp(-1 + inverse), rel=1e-5)
        [gradient] = torch.autograd.grad(loss, own)
        assert gradient.item() == pytest.approx(0 if bounded else math.exp(-1 - mu), rel=1e-5)
    # T / S of a token that the policy finds impossible: at most exp(20).
    weight = divergence_of(0)(torch.tensor([-200.0]), torch.tensor([-0.5])).weight
    assert weight.item() == pytest.approx(-math.expm1(20), rel=1e-6)


def test_a_divergence_between_the_kls_goes_to_them_at_its_ends() -> None:
    for state in states():
        teacher = (state.teacher / 3).log_softmax(0)
        kls = {alpha: whole(alpha, state.logits, teacher).item() for alpha in (0, 1)}
        for alpha, end in ((0.001, 0), (0.999, 1)):
            near = whole(alpha, state.logits, teacher).item() / (alpha * (1 - alpha))
            assert near == pytest.approx(kls[end], rel=0.01)


@pytest.mark.parametrize("alpha", [-0.5, 1e-9, 0.0099, 0.9901, 1.5, NAN])
def test_what_is_no_divergence_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="no Jensen-Shannon divergence"):
        every_sample(next(states()), divergence_alpha=alpha)


def test_shapes_that_differ_are_refused_by_name() -> None:
    given = dict.fromkeys(("old_logprobs", "teacher_logprobs", "sampled_in_top", "mask"), 3)
    for name in given:
        sizes = given | {name: 4}
        with pytest.raises(ValueError, match=f"{name} has shape"):
            gate_of_shapes(**sizes)
    with pytest.raises(ValueError, match="teacher_top_logprobs has shape"):
        gate_of_shapes(**given, teacher_top_logprobs=4)


def gate_of_shapes(
    old_logprobs: int,
    teacher_logprobs: int,
    sampled_in_top: int,
    mask: int,
    teacher_top_logprobs: int = 3,
) -> None:
    GATES["teacher_divergence"](
        torch.zeros(1, 3),
        torch.zeros(1, old_logprobs),
        torch.zeros(1, 3),
        torch.zeros(1, mask, dtype=torch.bool),
        torch.zeros(1, 3),
        top_logprobs=torch.zeros(1, 3, 2),
        teacher_top_logprobs=torch.zeros(1, teacher_top_logprobs, 2),
        teacher_logprobs=torch.zeros(1, teacher_logprobs),
        sampled_in_top=torch.zeros(1, sampled_in_top, dtype=torch.bool),
    )


# --- what others do with all other tokens

Rule = Callable[[float, Tensor, Tensor], Tensor]


def truncated(alpha: float, policy: Tensor, teacher: Tensor) -> Tensor:
    """Of probabilities that need not add up to 1."""
    m = (1 - alpha) * policy + alpha * teacher
    if alpha == 1:
        return (policy * (policy / teacher).log()).sum()
    if alpha == 0:
        return (teacher * (teacher / policy).log()).sum()
    of_policy = (1 - alpha) * policy * (policy / m).log()
    return (alpha * teacher * (teacher / m).log() + of_policy).sum()


def renormalised(alpha: float, policy: Tensor, teacher: Tensor) -> Tensor:
    return truncated(alpha, policy / policy.sum(), teacher / teacher.sum())


def tail_bucket(alpha: float, policy: Tensor, teacher: Tensor) -> Tensor:
    policy, teacher = (torch.cat([p, 1 - p.sum()[None]]) for p in (policy, teacher))
    return truncated(alpha, policy, teacher)


RULES: dict[str, Rule] = {
    "truncated": truncated,
    "renormalised": renormalised,
    "tail_bucket": tail_bucket,
}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rest", RESTS)
def test_what_is_called_biased_is_off_where_this_one_is_not(rest: str, alpha: float) -> None:
    """The check above can fail: it does for each of them, at nearly every state."""
    off: list[float] = []
    for state in states():
        if not 0 < len(state.candidates) < len(state.logits) - 1:
            continue

        def rule(at: Tensor, state: State = state) -> Tensor:
            policy = at.softmax(0)[state.candidates]
            return RULES[rest](alpha, policy, state.teacher[state.candidates].exp())

        found = every_sample(state, divergence_alpha=alpha, candidates_rest=rest)
        value, gradient = slope(rule, state.logits)
        close(found.values, value.expand_as(found.values))
        close(found.gradients, gradient.expand_as(found.gradients))
        _, exact = slope(lambda at, s=state: whole(alpha, at, s.teacher), state.logits)
        off.append(far(gradient, exact))
    assert len(off) > 20
    assert sorted(off)[len(off) // 20] > 0.01


def test_a_bucket_of_what_is_left_is_never_empty() -> None:
    """Rounded probabilities may add up to more than 1: what is left is a rounding error's then."""
    one = torch.ones(1, 1)
    top = torch.tensor([[[0.75, 0.5]]]).log().requires_grad_()
    loss, _ = GATES["teacher_divergence"](
        one,
        one,
        one,
        one.bool(),
        one,
        top_logprobs=top,
        teacher_top_logprobs=torch.tensor([[[0.25, 0.5]]]).log(),
        teacher_logprobs=one,
        sampled_in_top=one.bool(),
        candidates_rest="tail_bucket",
    )
    eps = torch.finfo(torch.float32).eps
    expected = 0.75 * math.log(3) + eps * math.log(eps / 0.25)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    [gradient] = torch.autograd.grad(loss, top)
    close(gradient, torch.tensor([[[0.75 * (math.log(3) + 1), 0.5]]]), 1e-5)


# --- opd, minillm, iw_opd, kdrl: sequences of two tokens


class Pairs(NamedTuple):
    """Logits of the policy and log-probabilities of the teacher: of the first token [V], and of the
    second after each first one [V, V].
    """

    first: Tensor
    second: Tensor
    teacher_first: Tensor
    teacher_second: Tensor

    @property
    def logits(self) -> Tensor:
        """[1 + V, V], the first token's above the second's."""
        return torch.cat([self.first[None], self.second])


def pairs(scale: float = 1.0) -> Iterator[Pairs]:
    generator = torch.Generator().manual_seed(9)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    for size in (5, 6, 7, 5, 6, 7):
        teachers = [(scale * normal(*shape)).log_softmax(-1) for shape in ((size,), (size, size))]
        yield Pairs(normal(size), normal(size, size), *teachers)


def sum_of_states(pair: Pairs, logits: Tensor) -> Tensor:
    """KL(policy || teacher) of every token, those before it held fixed."""
    before = logits[0].softmax(0).detach()
    of_second = whole(1, logits[1:], pair.teacher_second)
    return whole(1, logits[0], pair.teacher_first) + (before * of_second).sum()


def of_sequences(pair: Pairs, logits: Tensor) -> Tensor:
    """KL(policy || teacher) of whole sequences."""
    policy = logits[0].log_softmax(0)[:, None] + logits[1:].log_softmax(1)
    teacher = pair.teacher_first[:, None] + pair.teacher_second
    return (policy.exp() * (policy - teacher)).sum()


def laid_out(first: Tensor, second: Tensor) -> Tensor:
    """[V * V, 5]: every sequence, a tool's token between its two, prompt and padding around."""
    each = [first[:, None].expand_as(second).reshape(-1), second.reshape(-1)]
    nothing = torch.full_like(each[0], NAN)
    return torch.stack([nothing, each[0], nothing, each[1], nothing], 1)


def row_on_sequences(name: str, pair: Pairs, **numbers: Any) -> tuple[Tensor, Tensor]:
    """The row's advantages of every sequence [V * V, 2], and its mean gradient by the logits."""
    row = ROWS[name]
    logits = pair.logits.clone().requires_grad_()
    logprobs = laid_out(logits[0].log_softmax(0), logits[1:].log_softmax(1))
    mask = ~logprobs.isnan()
    own = logprobs.detach()
    zeros = torch.zeros_like(own)
    given = AdvantageInputs(
        rewards=zeros[:, 0],
        token_rewards=zeros,
        response_mask=mask,
        group_ids=torch.arange(len(own)),
        old_logprobs=own,
        teacher_logprobs=laid_out(pair.teacher_first, pair.teacher_second),
    )
    advantages, _ = ADVANTAGES[row.advantage](given, **numbers)
    chances = own.nansum(1, keepdim=True).exp().expand_as(own)
    anchor = RATIOS[row.ratio](logprobs, own, mask)
    loss, _ = GATES[row.gate](logprobs, anchor, advantages, mask, chances)
    assert advantages[~mask].eq(0).all()
    return advantages[mask].reshape(-1, 2), torch.autograd.grad(loss, logits)[0]


def chances_of(pair: Pairs) -> Tensor:
    """[V * V]: of every sequence, by the policy."""
    each = pair.first.log_softmax(0)[:, None] + pair.second.log_softmax(1)
    return each.exp().reshape(-1)


@pytest.mark.parametrize("coeff", [1.0, 0.3])
def test_opd_is_the_sum_of_the_divergences_of_states(coeff: float) -> None:
    for pair in pairs():
        advantages, found = row_on_sequences("opd", pair, teacher_coeff=coeff)
        assert advantages.abs().max() < 10 * coeff
        value, gradient = slope(lambda at, pair=pair: sum_of_states(pair, at), pair.logits)
        close(found, coeff * gradient)
        close(-(chances_of(pair)[:, None] * advantages).sum(), coeff * value)


def test_opd_is_biased_where_a_gap_is_clamped() -> None:
    for pair in pairs(scale=6.0):
        advantages, found = row_on_sequences("opd", pair)
        assert advantages.abs().max() == 10
        _, gradient = slope(lambda at, pair=pair: sum_of_states(pair, at), pair.logits)
        assert far(found, gradient) > 0.01


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_minillm_is_the_divergence_of_sequences_and_without_what_follows_opd(gamma: float) -> None:
    """Of two tokens it is linear in gamma."""
    for pair in pairs():
        advantages, found = row_on_sequences("minillm", pair, teacher_gamma=gamma)
        _, states_gradient = slope(lambda at, pair=pair: sum_of_states(pair, at), pair.logits)
        value, gradient = slope(lambda at, pair=pair: of_sequences(pair, at), pair.logits)
        close(found, (1 - gamma) * states_gradient + gamma * gradient)
        assert far(states_gradient, gradient) > 0.01
        if gamma == 1:
            close(-(chances_of(pair) * advantages[:, 0]).sum(), value)


@pytest.mark.parametrize("gamma", [0.3, 1.0])
def test_minillm_with_equal_lengths_is_biased(gamma: float) -> None:
    for pair in pairs():
        _, found = row_on_sequences("minillm", pair, teacher_gamma=gamma, teacher_mean=True)
        for objective in (of_sequences, sum_of_states):
            _, gradient = slope(lambda at, pair=pair, of=objective: of(pair, at), pair.logits)
            assert far(found, gradient) > 0.01


@pytest.mark.parametrize("coeff", [0.0, 0.5, 2.0])
def test_iw_opd_is_biased_unless_its_coefficient_is_0(coeff: float) -> None:
    for pair in pairs():
        _, found = row_on_sequences("iw_opd", pair, prefix_coeff=coeff)
        _, gradient = slope(lambda at, pair=pair: sum_of_states(pair, at), pair.logits)
        if coeff == 0:
            close(found, gradient)
            continue
        # Whatever it is multiplied with.
        scale = (found * gradient).sum() / (found * found).sum()
        assert far(scale * found, gradient) > 0.01


@pytest.mark.parametrize("name", ["opd", "minillm", "iw_opd"])
@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-12), (torch.float32, 1e-6)])
def test_no_sequence_moves_a_policy_that_is_its_teacher(
    name: str, dtype: torch.dtype, bound: float
) -> None:
    for pair in pairs():
        first, second = (logits.to(dtype) for logits in pair[:2])
        same = Pairs(first, second, first.log_softmax(0), second.log_softmax(1))
        advantages, found = row_on_sequences(name, same)
        assert advantages.abs().max() < bound
        assert found.abs().max() < bound


def test_kdrl_adds_the_gap_with_a_weight_that_moves_along_a_line() -> None:
    row = ROWS["kdrl"]
    names = ("teacher_coeff", "teacher_coeff_end")
    numbers = {name: row.defaults[name] for name in names}
    assert numbers == {"teacher_coeff": 5e-3, "teacher_coeff_end": 1e-3}
    gaps = torch.tensor([[0.5, -1.0], [2.0, 0.25], [-3.0, 11.0], [1.0, 0.0]], dtype=F64)
    # Two of four right: a z-score is half of the root of three.
    scores = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=F64) * math.sqrt(3) / 2
    nothing = torch.zeros_like(gaps)
    for done, coeff in ((0.0, 5e-3), (0.25, 4e-3), (0.5, 3e-3), (1.0, 1e-3)):
        given = AdvantageInputs(
            rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]),
            token_rewards=nothing,
            response_mask=torch.ones(4, 2, dtype=torch.bool),
            group_ids=torch.zeros(4, dtype=torch.long),
            old_logprobs=nothing - 12,
            teacher_logprobs=gaps - 12,
            done=done,
        )
        found, _ = ADVANTAGES[row.advantage](given, **numbers)
        close(found, scores + coeff * gaps.clamp(max=10), 1e-6)
        still, _ = ADVANTAGES[row.advantage](given, teacher_coeff=0.4)
        close(still, scores + 0.4 * gaps.clamp(max=10), 1e-6)


# --- beside others


@pytest.mark.parametrize("at", range(5))
def test_with_all_candidates_it_is_what_trl_computes(at: int) -> None:
    """TRL's generalized_jsd_loss of recorded logits, of which some positions are no targets."""
    recorded = json.loads(RECORDED.read_text())["generalized_jsd"]
    case = recorded["cases"][at]
    logits = torch.tensor(recorded["student"], dtype=F64, requires_grad=True)
    teacher = torch.tensor(recorded["teacher"], dtype=F64).log_softmax(-1)
    mask = torch.tensor(recorded["labels"]) >= 0
    ids = torch.tensor(recorded["labels"]).clamp(min=0)[..., None]
    policy = logits.log_softmax(-1)
    loss, _ = GATES["teacher_divergence"](
        policy.gather(-1, ids)[..., 0],
        torch.full_like(policy[..., 0], -1.0),
        torch.zeros_like(policy[..., 0]),
        mask,
        mask / mask.sum(),
        top_logprobs=policy,
        teacher_top_logprobs=teacher,
        teacher_logprobs=teacher.gather(-1, ids)[..., 0],
        sampled_in_top=torch.ones_like(mask),
        divergence_alpha=case["beta"],
    )
    assert loss.item() == pytest.approx(case["loss"], abs=1e-7)
    [gradient] = torch.autograd.grad(loss, logits)
    close(gradient, torch.tensor(case["gradient"], dtype=F64), 1e-7)
