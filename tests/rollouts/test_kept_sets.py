"""Cut sampling in training: the policy is the distribution over the tokens that the sampler kept.

D=. python -m pytest tests/rollouts/test_kept_sets.py            # with -m "" twenty kills, too
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.data.batching import to_rollout_batch
from oxrl.data.episode_rows import EpisodeInputs
from oxrl.data.kept_sets import check_kept_sets
from oxrl.engines.sample.cached import CachedSampler
from oxrl.engines.sample.gumbel import restrict, sample_tokens
from oxrl.engines.sample.kept import KEPT_SETS
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.errors import ConfigError, InvariantError
from oxrl.functional.logprobs import Head, HeadOutput, chunked_head, head_of_batch
from oxrl.models.load import load_policy
from oxrl.models.network import read_tokens, token_model
from oxrl.runs.recorder import load_tensors, save_tensors
from oxrl.tables.columns import KEPT, KEPT_IDS
from oxrl.types import (
    Completion,
    Output,
    Ragged,
    Request,
    Segment,
    TokenBatch,
    TokenRun,
)
from oxrl_teachers.hints import HintedRows
from support.killed_runs import killed_until_done, uninterrupted
from support.samplers import TOKENIZER, lively, make_requests
from support.scripted import PAD, Play, scored
from support.scripted import requests as episode_requests
from support.small_runs import check_same, final_files, metric_lines, model_that_stops, rl_config
from support.talk import TALK

TEMPERATURE = 0.7
CUTS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "all": {"top_k": 4, "top_p": 0.9, "min_p": 0.1},
}
V = 7
DRAWS = 200
torch_of = torch.tensor


# --- The cuts, and the policy that they make, enumerated.


def kept_plainly(
    z: Sequence[float], temperature: float, *, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> list[int]:
    """Ids that stay, without torch: min_p over all tokens, top_k, then top_p over what is left."""
    largest = max(z)
    p = [math.exp((one - largest) / temperature) for one in z]
    order = sorted(range(len(z)), key=lambda id: (-z[id], id))
    left = [id for id in order if p[id] >= min_p]  # the largest is 1
    if top_k:
        left = left[:top_k]
    whole = sum(p[id] for id in left)
    kept: list[int] = []
    for id in left:
        if kept and top_p < 1 and sum(p[other] for other in kept) >= top_p * whole:
            break
        kept.append(id)
    return sorted(kept)


def cut(z: Tensor, temperature: float = TEMPERATURE, **cuts: Any) -> Tensor:
    """The sampler's logits of rows that are cut alike."""
    rows = len(z)
    return restrict(
        z,
        temperature=torch.full((rows,), temperature, dtype=z.dtype),
        top_k=torch.full((rows,), cuts.get("top_k", 0)),
        top_p=torch.full((rows,), cuts.get("top_p", 1.0), dtype=z.dtype),
        min_p=torch.full((rows,), cuts.get("min_p", 0.0), dtype=z.dtype),
    )


def drawn(seed: int = 0) -> list[Tensor]:
    """Logits of random policies."""
    generator = torch.Generator().manual_seed(seed)
    return [(1.5 * torch.randn(V, generator=generator, dtype=torch.float64)) for _ in range(DRAWS)]


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.6])
@pytest.mark.parametrize("name", CUTS)
def test_the_sampler_keeps_what_the_cuts_say_in_their_order(name: str, temperature: float) -> None:
    logits = torch.stack(drawn())
    kept = cut(logits, temperature, **CUTS[name]) > -torch.inf
    for row, z in zip(kept, logits.tolist(), strict=True):
        assert row.nonzero()[:, 0].tolist() == kept_plainly(z, temperature, **CUTS[name])


@pytest.mark.parametrize(
    ("z", "cuts", "kept"),
    [
        ([1.0, 2.0, 2.0, 2.0], {"top_k": 2}, [1, 2]),
        ([2.0, 2.0, 2.0, 2.0], {"top_p": 0.5}, [0, 1]),
        ([2.0, 1.0, 2.0, 0.0], {"min_p": 1.0}, [0, 2]),
        ([0.0, 5.0, 5.0, 1.0], {"top_k": 1, "min_p": 1.0}, [1]),
        ([9.0, 0.0, 0.0, 0.0], {"top_p": 1e-9}, [0]),
        # Of what top_k leaves, half is the first; of everything it would be two.
        ([math.log(4), math.log(3), math.log(3), math.log(3)], {"top_k": 2, "top_p": 0.55}, [0]),
    ],
)
def test_ties_go_to_lower_ids_and_the_likeliest_token_stays(
    z: list[float], cuts: dict[str, Any], kept: list[int]
) -> None:
    found = cut(torch_of([z]), 1.0, **cuts) > -torch.inf
    assert found[0].nonzero()[:, 0].tolist() == kept == kept_plainly(z, 1.0, **cuts)


def of_lists(lists: Sequence[Sequence[int]]) -> Ragged:
    counts = torch_of([0, *map(len, lists)])
    values = torch_of([id for ids in lists for id in ids], dtype=torch.int32)
    return Ragged(values=values, row_offsets=counts.cumsum(0))


def said_of_all(theta: Tensor, ids: list[int] | None, targets: list[int]) -> Tensor:
    """What the trainer's head says of each of some tokens after one context."""
    kept = None if ids is None else of_lists([ids] * len(targets))
    return chunked_head(
        theta.expand(len(targets), V),
        Head(torch.eye(V, dtype=theta.dtype)),
        torch_of(targets),
        temperature=TEMPERATURE,
        kept=kept,
    ).logprobs


def gradient(of: Tensor, theta: Tensor) -> Tensor:
    return torch.autograd.grad(of, theta)[0]


# Mean ratio, and the length of the expected score, of a policy over all tokens.
WITHOUT = {"top_p": (0.873, 0.184), "top_k": (0.910, 0.122), "min_p": (0.881, 0.181)}


@pytest.mark.parametrize("name", CUTS)
def test_score_and_gradient_are_those_of_the_policy_that_was_sampled_from(name: str) -> None:
    rewards = torch.Generator().manual_seed(1)
    ratios: list[float] = []
    scores: list[float] = []
    for logits in drawn():
        theta = logits.requires_grad_()
        kept = kept_plainly(theta.tolist(), TEMPERATURE, **CUTS[name])
        q = (theta.detach()[kept] / TEMPERATURE).softmax(0)
        given = torch.randn(V, generator=rewards, dtype=torch.float64)[kept]
        said = said_of_all(theta, kept, kept)
        assert torch.allclose(said, q.log(), rtol=0, atol=1e-12)
        assert gradient(q @ said, theta).norm() <= 1e-12
        # A baseline that is wrong by 1 changes nothing.
        learned = gradient((q * (given - q @ given - 1)) @ said_of_all(theta, kept, kept), theta)
        true = gradient((theta[kept] / TEMPERATURE).softmax(0) @ given, theta)
        assert (learned - true).norm() <= 1e-12
        everything = said_of_all(theta, None, kept)
        ratios.append(float(everything.detach().exp().sum()))
        scores.append(float(gradient(q @ everything, theta).norm()))
    if name in WITHOUT:
        ratio, score = WITHOUT[name]
        assert sum(ratios) / DRAWS == pytest.approx(ratio, abs=0.02)
        assert sum(scores) / DRAWS == pytest.approx(score, abs=0.03)


@pytest.mark.parametrize("name", CUTS)
def test_a_sampled_token_has_the_log_probability_of_the_kept_set(name: str) -> None:
    logits = torch.stack(drawn())
    restricted = cut(logits, **CUTS[name])
    temperature = torch.full((DRAWS,), TEMPERATURE, dtype=torch.float64)
    tokens, logprobs = sample_tokens(
        restricted, torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64),
        temperature=temperature, stochastic=None,
    )  # fmt: skip
    for z, token, said in zip(logits, tokens.tolist(), logprobs.tolist(), strict=True):
        kept = kept_plainly(z.tolist(), TEMPERATURE, **CUTS[name])
        assert token in kept
        assert said == pytest.approx(float(said_of_all(z, kept, [token])), abs=1e-12)


@pytest.mark.parametrize("name", CUTS)
def test_the_exact_kl_has_one_gradient_with_either_reference(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    for logits in drawn():
        theta = logits.requires_grad_()
        kept = kept_plainly(theta.tolist(), TEMPERATURE, **CUTS[name])
        other = theta.detach() + 0.7 * torch.randn(V, generator=generator, dtype=torch.float64)
        found: list[Tensor] = []
        for of_reference in (kept, None):
            said = said_of_all(theta, kept, kept)
            reference = said_of_all(other, of_reference, kept)
            found.append(gradient((said.exp() * (said - reference)).sum(), theta))
        assert (found[0] - found[1]).norm() <= 1e-12
        alike = said_of_all(theta.detach(), kept, kept)
        assert (alike.exp() * (said_of_all(theta, kept, kept) - alike)).sum().abs() <= 1e-15


# --- The head.

# The sets of six positions; none: all tokens.
SETS = ([0, 3, 8], [], [5], [1, 2, 3, 4, 9, 10], [], [0, 10])
TARGETS = (3, 7, 5, 10, 0, 0)


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, softcap: float | None, scale: float
) -> HeadOutput:
    """All logits, cut by minus infinity, and sums over what is left."""
    z = (hidden @ weight.T + bias) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / TEMPERATURE
    logprobs: list[Tensor] = []
    entropy: list[Tensor] = []
    squares: list[Tensor] = []
    for row, (ids, target) in enumerate(zip(SETS, TARGETS, strict=True)):
        chosen = list(ids) or list(range(len(weight)))
        log_p = z[row, chosen].log_softmax(0)
        logprobs.append(log_p[chosen.index(target)])
        entropy.append(-(log_p.exp() * log_p).sum())
        squares.append(log_p.exp().square().sum())
    several = [torch.stack(values) for values in (logprobs, entropy, squares)]
    return HeadOutput(*several, top_ids=None, top_logprobs=None, rest_logprobs=None)


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 100])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (4.0, 0.5)])
def test_the_head_cuts_each_position_whatever_the_chunk(
    chunk: int, softcap: float | None, scale: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((6, 5), (11, 5), (11,), (6,), (6,))
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    hidden, weight, bias = (tensor.requires_grad_() for tensor in made[:3])
    expected = plain(hidden, weight, bias, softcap, scale)
    found = chunked_head(
        hidden, Head(weight, bias, softcap, scale), torch_of(TARGETS), temperature=TEMPERATURE,
        entropy=True, sum_p_squared=True, kept=of_lists(SETS), chunk=chunk,
    )  # fmt: skip
    gradients: list[tuple[Tensor, ...]] = []
    for said in (expected, found):
        entropy = cast(Tensor, said.entropy)
        loss = said.logprobs @ made[3] + entropy @ made[4]
        gradients.append(torch.autograd.grad(loss, (hidden, weight, bias)))
    for name in ("logprobs", "entropy", "sum_p_squared"):
        assert torch.allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-12)
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_tokens_that_are_masked_out_do_not_shift_the_sets_of_others() -> None:
    tokens = torch_of([[9, *TARGETS[:3]], [9, *TARGETS[3:]]])
    lists = of_lists([[], *SETS[:3], [], *SETS[3:]])
    hidden = torch.randn(8, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    head = Head(torch.eye(11, 5, dtype=torch.float64))
    every = torch.ones_like(tokens, dtype=torch.bool)
    whole = head_of_batch(hidden, head, tokens, every, temperature=1.0, kept=lists)["logprobs"]
    mask = torch_of([[True, False, True, True], [False, True, False, True]])
    some = head_of_batch(hidden, head, tokens, mask, temperature=1.0, kept=lists)["logprobs"]
    mask[:, 0] = False
    assert torch.equal(some, whole * mask)


def test_ids_that_another_model_does_not_know_have_no_share_of_its_probability() -> None:
    head = Head(torch.eye(4, dtype=torch.float64))
    hidden = torch.zeros(2, 4, dtype=torch.float64)
    found = chunked_head(hidden, head, torch_of([1, 3]), kept=of_lists([[1, 2, 6], [3, 4, 5]]))
    assert found.logprobs.tolist() == pytest.approx([-math.log(2), 0.0])


@pytest.mark.parametrize("rows", [[], [2], [0, 1, 2, 3, 4], [4, 1, 1, 3], [3, 0]])
@pytest.mark.parametrize("width", [0, 3])
def test_rows_of_uneven_length_are_selected(rows: list[int], width: int) -> None:
    lists = [[1, 2], [], [3, 4, 5], [6], [7, 8]]
    ragged = of_lists(lists)
    values = ragged.values
    if width:
        values = values[:, None] * torch.arange(1, width + 1)
    found = dataclasses.replace(ragged, values=values).select(torch_of(rows, dtype=torch.int64))
    chosen = of_lists([lists[row] for row in rows])
    assert torch.equal(found.row_offsets, chosen.row_offsets)
    expected = chosen.values
    assert torch.equal(found.values[:, 0] if width else found.values, expected)


# --- Samplers.

SAMPLERS: dict[str, Any] = {"local": LocalSampler, "cached": CachedSampler}


def sampler_of(kind: str, rows: int = 3) -> Any:
    return SAMPLERS[kind](lively("builtin:tiny"), TOKENIZER, max_rows=rows, recorded=KEPT_SETS)


# Of requests that are greedy, or cut nothing.
UNCUT = ("-", "g", "more -", "more g", "begun -", "begun g")


def mixed(prefix: str = "") -> list[Request]:
    """Requests that differ in length and cuts, with some that are not cut and some greedy ones."""
    made = [
        make_requests(2, prefix=f"{prefix}k", max_tokens=4, stop_token_ids=(), top_k=5),
        make_requests(2, prefix=f"{prefix}p", max_tokens=11, stop_token_ids=(), top_p=0.7),
        make_requests(2, prefix=f"{prefix}-", max_tokens=6, stop_token_ids=()),
        make_requests(
            2, prefix=f"{prefix}m", max_tokens=9, stop_token_ids=(), min_p=0.1, temperature=0.7
        ),
        make_requests(
            1, prefix=f"{prefix}g", max_tokens=5, stop_token_ids=(), top_k=3, temperature=0.0
        ),
        make_requests(
            2, prefix=f"{prefix}a", max_tokens=3, stop_token_ids=(), temperature=1.3,
            top_k=30, top_p=0.9, min_p=0.01,
        ),
    ]  # fmt: skip
    lists = [list(one) for one in made]
    return [one.pop(0) for _ in range(2) for one in lists if one]


def ids_of(entry: Any) -> list[int]:
    assert KEPT_IDS.takes(entry)
    return torch.frombuffer(bytearray(entry), dtype=torch.int32).tolist() if entry else []


def check_response(request: Request, completion: Completion) -> int:
    """Every token of a cut distribution has the likeliest tokens of its own place, itself among
    them, and the log-probability that it has there; how many such tokens there are.
    """
    [segment] = completion.segments
    entries = segment.columns[KEPT]
    assert len(entries) == len(segment.token_ids)
    if request.id.startswith(UNCUT):
        assert set(entries) <= {b""}
        return 0
    model = lively("builtin:tiny")
    row = torch_of([request.prompt.token_ids + segment.token_ids])
    with torch.no_grad():
        logits = model(input_ids=row).logits[0, len(request.prompt.token_ids) - 1 : -1]
    for z, token, said, entry in zip(
        logits.double(), segment.token_ids, segment.logprobs, entries, strict=True
    ):
        ids = ids_of(entry)
        assert ids == sorted(set(ids)) and token in ids and len(ids) < len(z)
        outside = torch.ones(len(z), dtype=torch.bool)
        outside[ids] = False
        assert z[ids].min() >= z[outside].max() - 1e-3
        own = (z[ids] / request.sampling.temperature).log_softmax(0)[ids.index(token)]
        assert said == pytest.approx(float(own), abs=1e-3)
    return len(entries)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_token_has_its_set_whatever_slots_its_row_moved_through(kind: str) -> None:
    asked = mixed() + mixed("more ")
    done = generate(sampler_of(kind), asked, deadline_s=60)
    assert sum(map(check_response, asked, done)) > 80


@pytest.mark.parametrize("kind", SAMPLERS)
def test_rows_alone_have_the_sets_that_they_have_among_others(kind: str) -> None:
    asked = mixed()
    done = generate(sampler_of(kind, 9), asked, deadline_s=60)
    # Which rows are read together moves numbers by rounding, so sets are compared by their size.
    for request, completion in zip(asked, done, strict=True):
        [alone] = generate(sampler_of(kind, 1), [request], deadline_s=60)
        sizes = [
            [len(entry) for entry in one.segments[0].columns[KEPT]] for one in (alone, completion)
        ]
        if alone.token_ids == completion.token_ids and request.sampling.top_k == 5:
            assert sizes[0] == sizes[1] == [20] * len(completion.token_ids)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_was_begun_before_keeps_its_sets(kind: str) -> None:
    engine = sampler_of(kind)
    asked = [one for one in mixed() if one.sampling.max_tokens > 4]
    engine.submit(asked)
    for _ in range(2):
        engine.poll(60, engine.round + 2)
    parts = {item.request.id: item.completion for item in engine.abort([one.id for one in asked])}
    again: list[Request] = []
    for request in asked:
        [segment] = parts[request.id].segments
        fields = ("token_ids", "logprobs", "versions", "columns")
        prefix = TokenRun(**{name: getattr(segment, name) for name in fields})
        again.append(dataclasses.replace(request, prefix=prefix))
    begun = [one for one in again if one.prefix.token_ids]
    assert begun
    done = generate(engine, again, deadline_s=60)
    assert sum(map(check_response, again, done)) > 20


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("rounds", [1, 3, 6])
def test_parked_rows_go_on_with_their_sets(kind: str, rounds: int) -> None:
    first = sampler_of(kind)
    asked = mixed()
    begun = [dataclasses.replace(one, id=f"begun {one.id}") for one in asked[:4]]
    found: dict[str, Completion] = {}
    for number, request in enumerate(begun):
        [done] = generate(sampler_of(kind), [request], deadline_s=60)
        segment: Segment = done.segments[0].first(2)
        fields = ("token_ids", "logprobs", "versions", "columns")
        prefix = TokenRun(**{name: getattr(segment, name) for name in fields})
        begun[number] = dataclasses.replace(request, prefix=prefix)
    asked = [*begun, *asked]
    first.submit(asked)
    # All that finishes until then is taken out.
    while some := first.poll(60, rounds):
        found |= {item.request.id: item.completion for item in some}
    state = json.loads(json.dumps(first.state()))
    second = sampler_of(kind)
    second.restore(state, {request.id: request for request in asked})
    while some := second.poll(60):
        found |= {item.request.id: item.completion for item in some}
    assert len(found) == len(asked)
    assert sum(check_response(request, found[request.id]) for request in asked) > 40


# --- Batches.


@pytest.mark.parametrize("reads", ["whole", "last", "window: 2"])
def test_rows_and_lines_of_episodes_have_the_sets_of_their_tokens(
    play: Play, reads: str, tmp_path: Path
) -> None:
    asked = [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, top_k=6))
        for one in episode_requests(6, samples=2, max_tokens=32)
    ]
    model = load_policy(str(model_that_stops(tmp_path / "model")))
    sampler = LocalSampler(model, TOKENIZER, max_rows=8, recorded=KEPT_SETS)
    engine = play(TALK.replace("Talk", "Made"), sampler, reads=reads)
    done = generate(engine, asked, deadline_s=120)
    batch = to_rollout_batch(scored(asked, done, samples=2), pad_id=PAD, columns={KEPT: KEPT_IDS})
    inputs = batch.inputs
    assert isinstance(inputs, EpisodeInputs) == (reads != "whole")
    chosen = torch_of([3, 1, 8])
    for rows in (torch.arange(len(batch)), chosen):
        part = batch.select(rows)
        check_kept_sets(part.inputs, 261, 0)
        assert (part.inputs.columns[KEPT][~part.inputs.response_mask] == 0).all()

        def forward(some: TokenBatch, want: Any) -> Output:
            return read_tokens(token_model(model), some, want, temperature=1.0)

        said = part.inputs.said_by(forward, frozenset({"logprobs"})).logprobs
        assert said is not None
        apart = (said - part.rollout_logprobs)[part.inputs.response_mask]
        assert apart.abs().max() < 1e-3


def batch_of_sets(sets: Sequence[Sequence[Sequence[int]]]) -> TokenBatch:
    """Two rows of a prompt token and three sampled ones, 4, 5 and 6."""
    counts = [[0, *map(len, row)] for row in sets]
    return TokenBatch(
        tokens=torch_of([[1, 4, 5, 6]] * 2),
        attention_mask=torch.ones(2, 4, dtype=torch.bool),
        response_mask=torch_of([[False, True, True, True]] * 2),
        columns={KEPT: torch_of(counts, dtype=torch.int32)},
        lists={KEPT: of_lists([[id for ids in row for id in ids] for row in sets])},
    )


SOUND = [[[4], [5, 9], [2, 6]], [[3, 4], [5], [0, 6, 9]]]


@pytest.mark.parametrize(
    ("row", "place", "ids", "said"),
    [
        (0, 1, [9], "lacks the token that was sampled: samples of step 7, row 0, place 1"),
        (1, 2, [], "lacks the token that was sampled: samples of step 7, row 1, place 2"),
        (1, 3, [6, 4], "ids that do not ascend: samples of step 7, row 1, place 3"),
        (0, 2, [5, 5], "ids that do not ascend: samples of step 7, row 0, place 2"),
        (1, 1, [4, 10], "id beyond the vocabulary of 10 tokens: samples of step 7, row 1, place 1"),
        (0, 3, [-1, 6], "id beyond the vocabulary of 10 tokens: samples of step 7, row 0, place 3"),
    ],
)
def test_a_broken_set_is_refused_with_its_place(
    row: int, place: int, ids: list[int], said: str
) -> None:
    found = check_kept_sets(batch_of_sets(SOUND), 10, 7)
    assert found == {"sampling/kept_mean": 11 / 6, "sampling/kept_max": 3.0}
    sets = [list(one) for one in SOUND]
    sets[row][place - 1] = ids
    with pytest.raises(InvariantError, match=said):
        check_kept_sets(batch_of_sets(sets), 10, 7)


# --- Runs.

Sections = dict[str, dict[str, Any]]
CUT = {"max_tokens": 6, "n_samples": 4, "top_k": 8, "top_p": 0.98, "min_p": 0.01}
AHEAD = {"max_staleness": 3, "rounds": 3, "force_strict_on_policy": False}
FROZEN = {"alg_name": "sgrpo", "lr": 0.0, "entropy_coeff": 0.01}
RUNS: dict[str, Sections] = {
    "synchronous": {},
    "temperature": {"rollout": {"temperature": 0.7}},
    "reference": {"train": {**FROZEN, "kl_coeff": 0.1}},
    "minibatches": {"train": {**FROZEN, "minibatches": 2}},
    "micro-batches": {"train": {**FROZEN, "micro_batch_tokens": 40}},
    "one by one": {"train": {**FROZEN, "share_prefix": False}},
    "cached sampler": {"model": {"attention": "eager"}},
    "in rounds": {"train": {"alg_name": "dapo", "lr": 0.0, "overlong_buffer": 2}},
    "sampling ahead": {"rollout": AHEAD},
    "critic": {"train": {"alg_name": "ppo", "lr": 0.0}},
    "score norms": {"train": {"alg_name": "otb", "lr": 0.0}},
    "two processes": {"inference_engine": {"processes": 2}},
}
SLOW = {"two processes"}


def model_that_may_stop(folder: Path) -> str:
    """A random model that ends a response with about half of what top_k 8 keeps."""
    model_that_stops(folder)
    model: Any = load_policy(str(folder))
    with torch.no_grad():
        model.lm_head.weight[1] *= 0.4
    model.save_pretrained(folder)
    return str(folder)


def cut_run(folder: Path, name: str, **sections: Any) -> Config:
    steps = {"steps": 4, "checkpoint_every": 0} | sections.pop("run", {})
    rollout = CUT | sections.pop("rollout", {})
    train = sections.pop("train", {"alg_name": "sgrpo", "lr": 1e-3})
    return rl_config(folder, name, run=steps, rollout=rollout, train=train, **sections)


def check_run(cfg: Config) -> None:
    """Trainer and sampler say the same where nothing moves the weights."""
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert len(lines) == 4
    for line in lines:
        assert line["mismatch/abs_logdiff_max"] <= 1e-6
        assert 1 < line["sampling/kept_mean"] <= line["sampling/kept_max"] <= 8
        assert line["policy/entropy"] <= math.log(8) + 1e-6
        # A reference that is the policy is no distance away.
        assert abs(line.get("kl/ref_k1", 0.0)) <= 1e-6
        assert line.get("kl/ref_k3", 0.0) <= 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    [*sorted(RUNS.keys() - SLOW), *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)],
)
def test_without_a_step_the_ratio_is_1(case: str, tmp_path: Path) -> None:
    sections = {"train": FROZEN, **RUNS[case]}
    model = {"name": model_that_may_stop(tmp_path / "model")}
    check_run(cut_run(tmp_path, "run", **{**sections, "model": sections.get("model", {}) | model}))


MOVES = {"alg_name": "sgrpo", "lr": 1e-3, "minibatches": 2}
EXACTLY: dict[str, Sections] = {
    "two minibatches": {},
    "temperature": {"rollout": {"temperature": 0.7}},
    "one by one": {"train": {**MOVES, "share_prefix": False}},
    "sampling ahead": {"rollout": AHEAD, "train": {"alg_name": "sgrpo", "lr": 1e-3}},
    "centered": {"train": {**MOVES, "centering": "score", "center_top": 3}},
    "centered, a head larger than the sets": {
        "train": {**MOVES, "centering": "score", "center_top": 12}
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", EXACTLY)
def test_in_exact_mode_the_ratio_of_what_was_sampled_is_exactly_1(
    case: str, tmp_path: Path
) -> None:
    model = {"name": model_that_may_stop(tmp_path / "model")}
    sections = {"train": MOVES, **EXACTLY[case]}
    cfg = cut_run(tmp_path, "run", **sections, model=model, run={"exact": True})
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert [line["mismatch/bits"] for line in lines] == [0.0] * len(lines)
    assert lines[0]["mismatch/bits_compared"] > 0
    assert lines[0]["mismatch/abs_logdiff_max"] == 0.0
    assert all(math.isfinite(line["update/grad_norm"]) for line in lines)
    # A head of 12 has all of a set of at most 8, and there is no tail.
    if case.startswith("centered, "):
        assert {line["update/center_tail_frac"] for line in lines} == {0.0}
    elif case == "centered":
        assert 0 < lines[0]["update/center_tail_frac"] < 1


def talking(folder: Path, reads: str) -> Sections:
    """Episodes whose turns read everything before, or the last answer alone."""
    (folder / "talk.py").write_text(TALK)
    return {
        "environment": {"name": f"{folder / 'talk.py'}:Talk", "max_turns": 3},
        "reward": {"name": ""},
        "rollout": {"max_tokens": 8, "n_samples": 2, "context": reads},
        "model": {"name": model_that_may_stop(folder / "model")},
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reads", ["whole", "last"])
def test_without_a_step_the_ratio_of_episodes_is_1(reads: str, tmp_path: Path) -> None:
    check_run(cut_run(tmp_path, "run", **talking(tmp_path, reads), train=FROZEN))


@pytest.mark.filterwarnings("ignore")
def test_a_hint_does_not_part_a_token_from_its_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is its own teacher, and reads the sampled tokens behind a longer prompt."""
    (tmp_path / "more.jinja").write_text("{{ prompt }} And be quick.")
    counted: list[float] = []
    ask = HintedRows.ask

    def seeing(self: HintedRows, scorer: Any, places: Any, batch: Any, want: Any) -> Any:
        def forward(inputs: TokenBatch, want: Any) -> Output:
            counted.append(check_kept_sets(inputs, 261, 0)["sampling/kept_mean"])
            own = inputs.lists[KEPT].values
            assert torch.equal(own, batch.inputs.lists[KEPT].values)
            return scorer.forward(inputs, want)

        spy: Any = SimpleNamespace(forward=forward)
        return ask(self, spy, places, batch, want)

    monkeypatch.setattr(HintedRows, "ask", seeing)
    train = {"alg_name": "opsd", "lr": 0.0, "loss": "ppo_clip", "advantage": "teacher_gap"}
    teachers = {"self": {"prompt": str(tmp_path / "more.jinja")}}
    run(cut_run(tmp_path, "run", train=train, model={"teachers": teachers}))
    assert len(counted) == 4 and min(counted) > 1


def same_files(one: Config, other: Config) -> None:
    """Two runs end with the same weights and state; how they were delivered may differ."""
    left, right = (
        {
            name: content
            for name, content in final_files(cfg.run.directory).items()
            if not name.startswith("delivery/")
        }
        for cfg in (one, other)
    )
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


KEEPING = {"record": "tokens", "steps": 4}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reads", [pytest.param("", marks=pytest.mark.full), "last"])
def test_two_processes_and_stored_samples_give_the_bytes_of_one(reads: str, tmp_path: Path) -> None:
    sections = talking(tmp_path, reads) if reads else {}
    one = cut_run(tmp_path, "one", **sections, run=KEEPING)
    run(one)
    two = cut_run(tmp_path, "two", **sections, run=KEEPING, inference_engine={"processes": 2})
    run(two)
    same_files(one, two)
    rollout = {**sections.get("rollout", {}), "from_samples": str(one.run.directory)}
    again = cut_run(tmp_path, "again", **{**sections, "rollout": rollout}, run=KEEPING)
    run(again)
    same_files(one, again)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_a_run_that_is_killed_gives_the_bytes_of_one_that_was_not(
    ahead: bool, kills: int, disk_path: Path
) -> None:
    rollout = AHEAD if ahead else {}
    steps = {"steps": 12 if kills == 3 else 44, "checkpoint_every": 3, "record": "tokens"}
    train = {"alg_name": "sgrpo", "lr": 1e-5}
    whole, killed = (
        cut_run(disk_path, name, run=steps, rollout=rollout, train=train)
        for name in ("whole", "killed")
    )
    uninterrupted(whole)
    hits = killed_until_done(killed, kills=kills, seed=kills)
    assert len(hits) == kills
    check_same(killed.run.directory, whole.run.directory)


def test_a_replay_samples_the_sets_again_and_notices_another_one(tmp_path: Path) -> None:
    cfg = cut_run(tmp_path, "run", run=KEEPING)
    run(cfg)
    assert all(found.equal for found in replay(cfg.run.directory, 3, tolerance=0.0))
    file = cfg.run.directory / "rollouts" / "step_00000002.safetensors"
    tensors = load_tensors(file)
    values = tensors[f"{KEPT}.values"]
    counts = tensors[KEPT].sum(1)
    values[int(counts[:5].sum())] += 1  # the first id of row 5
    save_tensors(tensors, file)
    wrong = [found for found in replay(cfg.run.directory, 3, tolerance=0.0) if not found.equal]
    assert [found.what for found in wrong] == ["sample 5 of step 3, kept.values per token"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ids, token: [id for id in ids if id != token], "lacks the token that was sampled"),
        (lambda ids, token: [*reversed(ids)], "has ids that do not ascend"),
        (lambda ids, token: [*ids, 261], "an id beyond the vocabulary of 261 tokens"),
    ],
)
def test_stored_samples_with_a_broken_set_are_refused(
    change: Any, said: str, tmp_path: Path
) -> None:
    first = cut_run(tmp_path, "first", run=KEEPING | {"steps": 2})
    run(first)
    path = first.run.directory / "rollouts" / "step_00000001.samples.jsonl"
    lines = path.read_text().splitlines()
    group = json.loads(lines[2])
    segment = group["responses"][1]["completion"]["segments"][0]
    entries = segment["columns"][KEPT]
    place, ids = next(
        (at, ids)
        for at, ids in enumerate(ids_of(base64.b64decode(entry)) for entry in entries)
        if len(ids) > 1
    )
    changed = torch_of(change(ids, segment["token_ids"][place]), dtype=torch.int32)
    entries[place] = base64.b64encode(changed.numpy().tobytes()).decode()
    lines[2] = json.dumps(group)
    path.write_text("\n".join(lines))
    second = cut_run(
        tmp_path, "second", run={"steps": 2}, rollout={"from_samples": str(first.run.directory)}
    )
    where = f"samples of step 1, row 5, place {len(group['prompt']['token_ids']) + place}"
    with pytest.raises(InvariantError, match=f"{said}.*{where}"):
        run(second)


SERVER = {"name": "builtin:tiny", "engine": "endpoint", "url": "http://localhost:1/v1"}
OTHER = {"model": {"teachers": {"other": {"name": "builtin:tiny"}}}}


@pytest.mark.parametrize(
    ("cuts", "sections", "said"),
    [
        ({"top_k": 5}, {"train": {"alg_name": "simko"}}, "top_k.*simko needs.*rollout.top_k: 0"),
        ({"top_p": 0.9}, {"train": {"alg_name": "dppo_topk_tv"}}, "top_p.*rollout.top_p: 1"),
        ({"min_p": 0.1}, {"train": {"alg_name": "dppo_topk_kl"}}, "min_p.*rollout.min_p: 0"),
        ({"top_k": 5}, {"train": {"alg_name": "opd_topk"}, **OTHER}, "opd_topk needs a teacher"),
        ({"top_k": 5}, {"train": {"alg_name": "gkd"}, **OTHER}, "gkd needs a teacher that also"),
        (
            {"top_k": 5},
            {"train": {"alg_name": "opd"}, "model": {"teachers": {"server": SERVER}}},
            "server.engine: endpoint tells of the whole one alone",
        ),
        (
            {"top_p": 0.9},
            {"inference_engine": {"name": "vllm", "actors": 1}},
            "top_k = 0.*from 1 to 256 where rollout.top_p cuts.*or set rollout.top_p: 1",
        ),
        (
            {"top_k": 257},
            {"inference_engine": {"name": "vllm"}},
            "top_k = 257.*from 1 to 256.*name: vllm tells of so many.*that engine to local",
        ),
        ({"top_k": 5, "temperature": 0.0}, {}, "temperature = 0.0.*cannot sample greedily"),
        (
            {"min_p": 0.1, "top_p": 0.9},
            {"inference_engine": {"name": "vllm", "actors": 1}},
            "top_k = 0.*or set rollout.top_p: 1, rollout.min_p: 0",
        ),
    ],
)
def test_what_does_not_go_with_a_cut_is_refused_and_says_what_to_set(
    cuts: dict[str, Any], sections: Sections, said: str, tmp_path: Path
) -> None:
    given: Any = {"train": {"alg_name": "sgrpo"}, **sections}
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        rl_config(tmp_path, "run", rollout={"max_tokens": 6, "n_samples": 4, **cuts}, **given)
