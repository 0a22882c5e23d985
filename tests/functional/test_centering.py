"""Score centering by enumeration: every token that may be sampled is sampled once, and counts by
its probability, through the objective of the row, its own gate, ratio and correction.

Beside it the same in plain Python, with a formula for every gate, which nothing of oxRL computes.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional.logprobs import Head, chunked_head
from oxrl.recipes.features.base import FeatureInputs
from oxrl.recipes.features.sampler_top import SamplerTop
from oxrl.recipes.objective import Objective
from oxrl.recipes.score_centering import old_outcomes, outcomes_of
from oxrl.tables.cells import CELLS
from oxrl.tables.columns import HEAD_IDS, HEAD_LOGPROBS, HEAD_REST
from oxrl.tables.policy import ROWS, Algorithm, Row
from oxrl.types import Output, PolicyBatch, TokenBatch

VOCABULARY = 7
# Far enough that some tokens are clipped, masked, rejected and dropped, and others are not.
NUMBERS: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.3,
    "clip_dual": 1.6,
    "weight_min": 0.8,
    "weight_max": 1.3,
    "sapo_positive": 1.5,
    "sapo_negative": 2.5,
    "gate_sharpness": 3.0,
    "drpo_delta": 0.1,
    "dppo_low": 0.02,
    "dppo_high": 0.02,
    "correction_level": "token",
    "correction_min": 0.7,
    "correction_max": 1.4,
}
RATIO_GATES = [
    "importance_sampling",
    "ppo_clip",
    "cispo",
    "sapo",
    "rgpo_like",
    "dppo_tv",
    "dppo_kl",
    "drpo",
]
CORRECTIONS = ["none", "truncate", "mask", "reject"]
# (gate, ratio, denominator, correction): all that centering works with.
ROWS_THAT_CENTER = [
    *(("policy_gradient", "none", "old", correction) for correction in CORRECTIONS),
    *((gate, "token", "old", correction) for gate in RATIO_GATES for correction in CORRECTIONS),
    *((gate, "token", "rollout", "none") for gate in RATIO_GATES),
]
NAMES = ["-".join(cells) for cells in ROWS_THAT_CENTER]


def row_of(gate: str, ratio: str, denominator: str, correction: str, **cells: Any) -> Row:
    chosen = {"gate": gate, "ratio": ratio, "denominator": denominator, "correction": correction}
    return dataclasses.replace(ROWS["cispo"], **chosen, **{"centering": "score", **cells})


def objective_of(row: Row, top: int, tail: str, old_logprobs: str = "recompute") -> Objective:
    values = {**row.defaults, **{k: v for k, v in NUMBERS.items() if k in row.defaults}}
    values |= {"kl_coeff": 0.0, "center_top": top, "center_tail": tail}
    algorithm = Algorithm(
        row=row,
        values=values,
        loss_numbers={},
        steps=1,
        updates=2,
        old_logprobs=old_logprobs,
        mask_truncated=False,
        entropy_coeff=0.0,
    )
    given = FeatureInputs(row=row, train=algorithm, max_tokens=1, models={})
    features = [SamplerTop(given)] if row.centering == "score" else []
    return Objective(algorithm, features, max_tokens=1)


class Place:
    """A place in a response: logits of the trainer now and before the update, and of the sampler.

    kept: tokens that the sampler kept; all three are distributions over them.
    """

    def __init__(self, seed: int, *, kept: int = VOCABULARY, apart: float = 0.5) -> None:
        draw = random.Random(seed)
        self.now = [1.5 * draw.gauss(0, 1) for _ in range(VOCABULARY)]
        self.old = [z + apart * draw.gauss(0, 1) for z in self.now]
        self.sampler = [z + apart * draw.gauss(0, 1) for z in self.old]
        order = sorted(range(VOCABULARY), key=lambda v: -self.sampler[v])
        self.kept = [v in order[:kept] for v in range(VOCABULARY)]

    def leaf(self) -> Tensor:
        return torch.tensor(self.now, dtype=torch.float64, requires_grad=True)

    def log(self, logits: Tensor | list[float]) -> Tensor:
        """Log-probabilities over what is kept."""
        z = torch.as_tensor(logits, dtype=torch.float64)
        return z.masked_fill(~torch.tensor(self.kept), -torch.inf).log_softmax(-1)


def outcomes(log_p: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the head, [K], and of everything else together."""
    others = log_p.clone()
    others = others.masked_fill(torch.isin(torch.arange(VOCABULARY), head), -torch.inf)
    if not (others > -torch.inf).any():
        return log_p[head], torch.tensor(-torch.inf, dtype=torch.float64)
    return log_p[head], others[others > -torch.inf].logsumexp(-1)


def gradient(objective: Objective, place: Place, advantages: list[float], top: int) -> Tensor:
    """Of the expected loss by the trainer's logits: a row for each token that may be sampled, which
    counts by its probability under the sampler.
    """
    theta = place.leaf()
    log_p, log_old, log_q = place.log(theta), place.log(place.old), place.log(place.sampler)
    head = log_q.topk(top).indices
    rows = torch.arange(VOCABULARY)[torch.tensor(place.kept)]
    count = len(rows)

    def sampled(of_tokens: Tensor) -> Tensor:
        """[N, 2]: a prompt of one token, then each of the tokens."""
        picked = of_tokens[rows]
        return torch.stack([torch.full_like(picked, torch.nan), picked], 1)

    def everywhere(of_place: Tensor) -> Tensor:
        """[N, 2, ...]: the same at every token, nothing at the prompt."""
        two = torch.stack([torch.full_like(of_place, -1), of_place])
        return two.expand(count, *two.shape)

    mask = torch.tensor([[False, True]]).expand(count, 2)
    head_q, rest_q = outcomes(log_q, head)
    columns = {
        HEAD_IDS: everywhere(head.to(torch.int32)),
        HEAD_LOGPROBS: everywhere(head_q),
        HEAD_REST: everywhere(rest_q),
    }
    if top == 1:
        columns = {name: values.reshape(count, 2) for name, values in columns.items()}
    inputs = TokenBatch(
        tokens=torch.stack([torch.full_like(rows, 3), rows], 1),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        columns=columns,
    )
    head_old, rest_old = outcomes(log_old, head)
    head_p, rest_p = outcomes(log_p, head)
    batch = PolicyBatch(
        inputs=inputs,
        old_logprobs=sampled(log_old),
        rollout_logprobs=sampled(log_q),
        ref_logprobs=None,
        advantages=sampled(torch.tensor(advantages, dtype=torch.float64)),
        loss_weights=sampled(log_q.exp()),
        versions=torch.zeros_like(inputs.tokens),
        group_ids=torch.zeros(count, dtype=torch.int64),
        old_outcomes=everywhere(torch.cat([head_old, rest_old[None]])),
    )
    output = Output(
        logprobs=sampled(log_p),
        top_logprobs=everywhere(head_p),
        rest_logprobs=everywhere(rest_p),
    )
    if objective.centering is None:
        output = Output(logprobs=output.logprobs)
    loss, _ = objective.policy_loss(output, batch)
    [found] = torch.autograd.grad(loss, theta)
    return found


def drift(
    cells: tuple[str, ...], place: Place, advantage: float, top: int, tail: str = "event"
) -> float:
    """Size of the expected update where every token is worth the same."""
    objective = objective_of(row_of(*cells), top, tail)
    return float(gradient(objective, place, [advantage] * VOCABULARY, top).norm())


# --- acceptance: no drift


@pytest.mark.parametrize("cells", ROWS_THAT_CENTER, ids=NAMES)
@pytest.mark.parametrize("advantage", [0.8, -0.8])
def test_a_constant_advantage_moves_nothing(cells: tuple[str, ...], advantage: float) -> None:
    """The whole vocabulary, the tail as one event, and sets that were kept inside of the head."""
    largest = 0.0
    uncentered = 0.0
    for seed in range(6):
        place = Place(seed)
        for top in (1, 2, 3, 5, VOCABULARY):
            largest = max(largest, drift(cells, place, advantage, top))
        for kept, top in ((1, 1), (2, 3), (3, 3), (4, 6)):
            largest = max(largest, drift(cells, Place(seed, kept=kept), advantage, top))
        plain = objective_of(row_of(*cells, centering="none"), 3, "event")
        moved = gradient(plain, place, [advantage] * VOCABULARY, 3)
        uncentered = max(uncentered, float(moved.norm()))
    assert largest <= 1e-12
    whole_ratio = cells[0] == "importance_sampling" and cells[2] == "rollout"
    assert (uncentered <= 1e-12) == whole_ratio, "without centering there is something to take out"


def test_these_are_all_cells_that_it_works_with() -> None:
    free = {
        kind: {c.name for c in CELLS.values() if c.kind == kind and not c.uncentered}
        for kind in ("ratio", "gate", "correction")
    }
    assert free["ratio"] == {cells[1] for cells in ROWS_THAT_CENTER}
    assert free["gate"] == {cells[0] for cells in ROWS_THAT_CENTER}
    assert free["correction"] == {cells[3] for cells in ROWS_THAT_CENTER}


def test_a_sampled_token_of_the_tail_that_is_trained_as_itself_leaves_drift() -> None:
    """The estimator of the papers: what the docs say of it, over 200 places."""
    cells = ("policy_gradient", "none", "old", "none")
    found = []
    for top in (2, 3, 5, VOCABULARY):
        sizes = [drift(cells, Place(seed, apart=0.354), 1.0, top, "token") for seed in range(200)]
        found.append(sum(sizes) / len(sizes))
    assert found == [
        pytest.approx(0.047, rel=0.15),
        pytest.approx(0.028, rel=0.15),
        pytest.approx(0.006, rel=0.25),
        pytest.approx(0.0, abs=1e-12),
    ]


# --- acceptance: no change where there is nothing to take out


@pytest.mark.parametrize("top", [2, 3, 5, VOCABULARY])
def test_nothing_changes_where_sampler_and_trainer_are_one(top: int) -> None:
    """Every token of the vocabulary is known, or a token of the tail is trained as itself."""
    place = Place(3, apart=0.0)
    advantages = [0.4, -1.0, 2.0, 0.1, -0.3, 0.9, -2.0]
    tails = ["token"] if top < VOCABULARY else ["token", "event"]
    for gate in ["policy_gradient", *RATIO_GATES]:
        cells = (gate, "none" if gate == "policy_gradient" else "token", "old", "none")
        plain = objective_of(row_of(*cells, centering="none"), top, "event")
        expected = gradient(plain, place, advantages, top)
        for tail in tails:
            centered = objective_of(row_of(*cells), top, tail)
            change = gradient(centered, place, advantages, top) - expected
            assert float(change.norm()) <= 1e-12


@pytest.mark.parametrize("top", [2, 5, VOCABULARY])
def test_nothing_changes_with_whole_importance_weights(top: int) -> None:
    cells = ("importance_sampling", "token", "rollout", "none")
    advantages = [0.4, -1.0, 2.0, 0.1, -0.3, 0.9, -2.0]
    for seed in range(4):
        place = Place(seed)
        plain = objective_of(row_of(*cells, centering="none"), top, "event")
        centered = objective_of(row_of(*cells), top, "token")
        expected = gradient(plain, place, advantages, top)
        assert float((gradient(centered, place, advantages, top) - expected).norm()) <= 1e-12


# --- an independent implementation: numbers, loops, a formula for every gate


def softmax(place: Place, logits: list[float]) -> list[float]:
    kept = [math.exp(z) if k else 0.0 for z, k in zip(logits, place.kept, strict=True)]
    return [x / sum(kept) for x in kept]


def gate_weight(gate: str, p: float, base: float, a: float) -> float:
    """The factor on A times the score of a token, from its source."""
    r = p / base
    n = NUMBERS
    if gate == "policy_gradient":
        return 1.0
    if gate == "importance_sampling":
        return r
    if gate == "ppo_clip":
        if a > 0:
            return r if r <= 1 + n["clip_high"] else 0.0
        return r if 1 - n["clip_low"] <= r <= n["clip_dual"] else 0.0
    if gate == "cispo":
        return min(max(r, n["weight_min"]), n["weight_max"])
    if gate in ("sapo", "rgpo_like"):
        tau = n["sapo_positive"] if a > 0 else n["sapo_negative"]
        if gate == "rgpo_like":
            tau = n["gate_sharpness"]
        s = 1 / (1 + math.exp(-tau * (r - 1)))
        return 4 * r * s * (1 - s)
    if gate == "drpo":
        return r * (1 - math.copysign(1, a) * (p - base) / n["drpo_delta"])
    if gate == "dppo_tv":
        far = abs(p - base)
    else:
        far = base * math.log(base / p) + (1 - base) * math.log((1 - base) / (1 - p))
    if far > n["dppo_high"] and ((a > 0 and r > 1) or (a < 0 and r < 1)):
        return 0.0
    return min(r, n["weight_max"])


def correction_weight(correction: str, old: float, q: float) -> float:
    rho = old / q
    inside = NUMBERS["correction_min"] <= rho <= NUMBERS["correction_max"]
    return {
        "none": 1.0,
        "truncate": min(rho, NUMBERS["correction_max"]),
        "mask": rho if inside else 0.0,
        "reject": 1.0 if inside else 0.0,
    }[correction]


def by_hand(
    cells: tuple[str, ...], place: Place, advantages: list[float], top: int, tail: str
) -> list[float]:
    """sum_y q_y A_y (sum_v q_v w_v s_v - w_y s_y), every sum written out."""
    gate, _, denominator, correction = cells
    p, old, q = (softmax(place, z) for z in (place.now, place.old, place.sampler))
    order = sorted(range(VOCABULARY), key=lambda v: -q[v])
    head = order[:top]
    groups = [[v] for v in head if q[v] > 0]  # outcomes: one token each, and the tail
    others = [v for v in order[top:] if q[v] > 0]
    if others:
        groups.append(others)

    def push(tokens: list[int], a: float) -> list[float]:
        """w times the score of an outcome."""
        p_s, old_s, q_s = (sum(x[v] for v in tokens) for x in (p, old, q))
        base = q_s if denominator == "rollout" else old_s
        w = gate_weight(gate, p_s, base, a) * correction_weight(correction, old_s, q_s)
        return [w * ((p[j] / p_s if j in tokens else 0.0) - p[j]) for j in range(VOCABULARY)]

    total = [0.0] * VOCABULARY
    for y in range(VOCABULARY):
        if q[y] == 0:
            continue
        a = advantages[y]
        as_what = [y] if y in head or tail == "token" else others
        own = push(as_what, a)
        for j in range(VOCABULARY):
            middle = sum(sum(q[v] for v in group) * push(group, a)[j] for group in groups)
            total[j] -= q[y] * a * (own[j] - middle)
    return total


@pytest.mark.parametrize("cells", ROWS_THAT_CENTER, ids=NAMES)
@pytest.mark.parametrize("tail", ["event", "token"])
def test_the_gradient_is_that_of_a_second_implementation(cells: tuple[str, ...], tail: str) -> None:
    draw = random.Random(1)
    for seed, kept, top in ((0, 7, 2), (1, 7, 3), (2, 7, 5), (3, 7, 7), (4, 3, 4), (5, 7, 1)):
        place = Place(seed, kept=kept)
        advantages = [draw.gauss(0, 1) for _ in range(VOCABULARY)]
        objective = objective_of(row_of(*cells), top, tail)
        found = gradient(objective, place, advantages, top)
        expected = torch.tensor(by_hand(cells, place, advantages, top, tail), dtype=torch.float64)
        assert float((found - expected).norm()) <= 1e-12


@pytest.mark.parametrize(("age", "share"), [(0, 0.0), (1, 0.0), (2, 0.5), (4, 0.75)])
def test_an_interpolated_policy_says_of_the_head_what_it_says_of_tokens(
    age: int, share: float
) -> None:
    """A-3PO: (age - 1) / age of the way from the sampler to the current policy."""
    now = torch.tensor([[[0.0, 0.0, 0.0], [-1.0, -2.0, -3.0]]], dtype=torch.float64)
    sampler = torch.tensor([[[0.0, 0.0, 0.0], [-1.5, -1.0, -2.0]]], dtype=torch.float64)
    mask = torch.tensor([[False, True]])
    batch = PolicyBatch(
        inputs=TokenBatch(tokens=mask.long(), attention_mask=mask, response_mask=mask),
        old_logprobs=None,
        rollout_logprobs=sampler[..., 0],
        ref_logprobs=None,
        advantages=now[..., 0],
        loss_weights=now[..., 0],
        versions=mask.long(),
        group_ids=torch.zeros(1, dtype=torch.int64),
        ages=torch.full((1, 2), age),
    )
    between = [
        s + share * (n - s) for n, s in zip((-1.0, -2.0, -3.0), (-1.5, -1.0, -2.0), strict=True)
    ]
    found = old_outcomes(now.requires_grad_(), sampler, batch)
    assert not found.requires_grad
    assert found[0, 1].tolist() == pytest.approx(between, abs=1e-12)
    current = old_outcomes(now, sampler, dataclasses.replace(batch, ages=None))
    assert torch.equal(current, now) and not current.requires_grad


# --- the rest of the head


def head_problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(9, 5, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(13, 5, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, 13, (9,), generator=generator)
    candidates = torch.stack([torch.randperm(13, generator=generator)[:4] for _ in range(9)])
    return hidden.requires_grad_(), weight.requires_grad_(), targets, candidates


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_rest_and_its_gradient_are_those_of_full_logits(chunk: int, temperature: float) -> None:
    hidden, weight, targets, candidates = head_problem()
    found = chunked_head(
        hidden,
        Head(weight),
        targets,
        temperature=temperature,
        entropy=True,
        top_k=4,
        candidates=candidates,
        rest=True,
        chunk=chunk,
    )
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    others = log_p.masked_fill(torch.zeros(9, 13).scatter(1, candidates, 1.0) > 0, -torch.inf)
    expected = others.logsumexp(-1)
    assert found.rest_logprobs is not None
    assert torch.allclose(found.rest_logprobs, expected, rtol=0, atol=1e-13)
    assert found.entropy is not None
    weights = torch.arange(1.0, 10.0, dtype=torch.float64)
    ours = (weights * (found.rest_logprobs + 0.3 * found.logprobs + 0.2 * found.entropy)).sum()
    theirs = expected + 0.3 * log_p.gather(1, targets[:, None]).squeeze(1)
    theirs = theirs - 0.2 * (log_p.exp() * log_p).sum(-1)
    given = torch.autograd.grad(ours, (hidden, weight))
    wanted = torch.autograd.grad((weights * theirs).sum(), (hidden, weight))
    for one, other in zip(given, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_rest_far_below_rounding_is_not_rounding() -> None:
    """In float32 1 minus the head is 0 or 6e-8; the rest is 1e-20 here, and known to 6 digits."""
    logits = torch.tensor([[0.0, -1.0, -46.0, -47.0]])
    found = chunked_head(
        torch.eye(4)[:1] * 0 + logits,
        Head(torch.eye(4)),
        torch.tensor([0]),
        top_k=2,
        candidates=torch.tensor([[0, 1]]),
        rest=True,
    )
    exact = math.log(math.exp(-46) + math.exp(-47)) - math.log(1 + math.exp(-1))
    assert float(found.rest_logprobs) == pytest.approx(exact, rel=1e-6)  # pyright: ignore[reportArgumentType]


def test_a_rest_of_nothing_has_no_probability_and_no_gradient_that_is_no_number() -> None:
    """All tokens are in the head, or those that are not are never sampled."""
    for never in (None, torch.tensor([False] * 4 + [True] * 9)):
        hidden, weight, targets, _ = head_problem()
        ids = torch.arange(4 if never is not None else 13).expand(9, -1)
        found = chunked_head(
            hidden,
            Head(weight, never=never),
            targets % 4,
            top_k=ids.shape[1],
            candidates=ids,
            rest=True,
        )
        assert found.rest_logprobs is not None and found.top_logprobs is not None
        assert found.rest_logprobs.tolist() == [-math.inf] * 9
        unread = torch.where(found.rest_logprobs > -torch.inf, found.rest_logprobs, 0.0)
        loss = (unread + found.top_logprobs[:, 0]).sum()
        for one in torch.autograd.grad(loss, (hidden, weight)):
            assert one.isfinite().all()


def test_outcomes_are_the_head_and_then_the_rest() -> None:
    output = Output(top_logprobs=torch.zeros(2, 3, 4), rest_logprobs=torch.ones(2, 3))
    found = outcomes_of(output)
    assert found.shape == (2, 3, 5)
    assert found[..., -1].eq(1).all() and found[..., :-1].eq(0).all()
