"""What is recorded of vLLM's samples, from the log-probabilities that it returns: a stand-in of vLLM
here, and in `make test-scale` vLLM itself against the local sampler.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from oxrl.checkpoint.model_files import save_model
from oxrl.engines.sample.gumbel import restrict
from oxrl.engines.sample.kept import KEPT_SETS
from oxrl.engines.sample.likeliest import LikeliestRecorder
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.rows import Recorded
from oxrl.engines.sample.sampler import generate
from oxrl.engines.sample.vllm_columns import RETURNED, returned_tokens
from oxrl.engines.sample.vllm_worker import _gathered  # pyright: ignore[reportPrivateUsage]
from oxrl.errors import EngineError
from oxrl.functional.logprobs import NO_CHANCE
from oxrl.models.weights import buckets
from oxrl.tables.columns import (
    HEAD_IDS,
    HEAD_LOGPROBS,
    HEAD_REST,
    KEPT,
    KEPT_IDS,
    Columns,
    head_columns,
)
from oxrl.types import Request, Sampling, TokenRun
from support.parked import in_flight_of, run_to, through_json
from support.samplers import TOKENIZER, lively, make_requests

V = 11
CUTS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 6},
    "all": {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
    "one": {"top_k": 1},
    "greedy": {"top_k": 5, "temperature": 0.0},
}


class Tensors(NamedTuple):
    """As vLLM's LogprobsTensors."""

    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor


def gather(logprobs: Tensor, count: int, token_ids: Tensor) -> Tensors:
    """As vLLM does: the sampled token, and the likeliest."""
    likeliest = logprobs.topk(count, dim=1)
    own = token_ids[:, None]
    return Tensors(
        torch.cat([own, likeliest.indices], 1).to(torch.int32),
        torch.cat([logprobs.gather(1, own), likeliest.values], 1),
        torch.zeros(len(own), dtype=torch.int32),
    )


def flat_of(found: Tensors, asked: int) -> Any:
    """As vLLM's FlatLogprobs of one request: of a batch where others may have asked for more."""
    width = 1 + asked
    starts = [row * width for row in range(len(found.logprobs))]
    return SimpleNamespace(
        token_ids=found.logprob_token_ids[:, :width].flatten().tolist(),
        logprobs=found.logprobs[:, :width].flatten().tolist(),
        start_indices=starts,
        end_indices=[start + width for start in starts],
    )


def asked_with(cuts: Mapping[str, Any]) -> Request:
    [request] = make_requests(1)
    return dataclasses.replace(request, sampling=Sampling(**cuts))


def cut_logprobs(seed: int, cuts: Mapping[str, Any]) -> Tensor:
    """[5, V] of what is sampled from; what is left out has minus infinity."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(5, V, generator=generator)
    if cuts.get("temperature") != 0:
        ones = torch.ones(5)
        logits = restrict(
            logits,
            temperature=ones,
            top_k=torch.full((5,), cuts.get("top_k", 0)),
            top_p=ones * cuts.get("top_p", 1.0),
            min_p=ones * cuts.get("min_p", 0.0),
        )
    return logits.log_softmax(1)


@pytest.mark.parametrize("more", [0, 3], ids=["alone", "beside one that asks for more"])
@pytest.mark.parametrize("head", [0, 1, 3, V])
@pytest.mark.parametrize("name", CUTS)
def test_each_column_is_read_at_its_token(name: str, head: int, more: int) -> None:
    cuts = CUTS[name]
    columns: Columns = {KEPT: KEPT_IDS, **(head_columns(head) if head else {})}
    request = asked_with(cuts)
    asked = returned_tokens(request.sampling, columns)
    if name in ("none", "greedy") and not head:
        assert asked == 0  # nothing of it is recorded
        return
    in_all = min(asked + more, 1 + V)
    for seed in range(20):
        logprobs = cut_logprobs(seed, cuts)
        sampled = logprobs.argmax(1)
        flat = flat_of(_gathered(gather, head, logprobs.clone(), in_all, sampled), asked)
        tokens = sampled.tolist()
        assert [flat.token_ids[at] for at in flat.start_indices] == tokens
        read = {
            name: RETURNED[name](request, tokens, flat, column) for name, column in columns.items()
        }
        # vLLM may know of more tokens than have been taken over.
        fewer = RETURNED[KEPT](request, tokens[:2], flat, columns[KEPT])
        assert fewer == read[KEPT][:2]
        for at, row in enumerate(logprobs.tolist()):
            check(row, {name: entries[at] for name, entries in read.items()}, request, head)


def test_of_tokens_of_a_prompt_nothing_more_is_returned() -> None:
    logprobs = cut_logprobs(0, {})
    scored = logprobs.argmin(1)
    found = _gathered(gather, 3, logprobs, 0, scored)
    assert found.logprob_token_ids.tolist() == scored[:, None].tolist()
    torch.testing.assert_close(found.logprobs, logprobs.gather(1, scored[:, None]))


@pytest.mark.parametrize("cuts", [{"top_p": 0.9}, {"min_p": 0.1}])
def test_a_set_without_a_bound_is_refused(cuts: dict[str, Any]) -> None:
    assert returned_tokens(Sampling(**cuts), head_columns(4)) == 5
    with pytest.raises(EngineError, match=r"rollout\.top_k"):
        returned_tokens(Sampling(**cuts), {KEPT: KEPT_IDS})


def check(row: list[float], read: Mapping[str, Any], request: Request, head: int) -> None:
    """Against the row itself, without any tensor."""
    there = [id for id in range(V) if row[id] > -math.inf]
    sampling = request.sampling
    kept = there if sampling.top_k and sampling.temperature else []
    assert read[KEPT] == array("i", kept).tobytes()
    if not head:
        return
    order = sorted(range(V), key=lambda id: -row[id])
    values = [max(row[id], NO_CHANCE) for id in order[:head]]
    rest = math.fsum(math.exp(row[id]) for id in order[head:])
    if head == 1:
        assert read[HEAD_IDS] == order[0]
        assert read[HEAD_LOGPROBS] == pytest.approx(values[0], abs=1e-6)
    else:
        ids, logprobs = array("i", read[HEAD_IDS]), array("f", read[HEAD_LOGPROBS])
        finite = sum(value > NO_CHANCE for value in values)
        assert ids.tolist()[:finite] == order[:finite] and len(set(ids)) == head
        assert logprobs.tolist() == pytest.approx(values, rel=1e-6)
    if rest:
        assert read[HEAD_REST] == pytest.approx(math.log(rest), abs=2e-6)
    else:
        assert read[HEAD_REST] == NO_CHANCE


def test_the_rest_is_not_what_the_others_leave_of_one() -> None:
    """With 1e-9 of chance left, 1 minus the sum in float32 would be 0, or a hundred times that."""
    logits = torch.zeros(1, V, dtype=torch.float64)
    logits[0, 2:] = -20.0
    logprobs = logits.log_softmax(1)
    sampled = torch.tensor([1])
    found = _gathered(gather, 2, logprobs.float(), 3, sampled)
    exact = math.log(9 * math.exp(-20.0) / (2 + 9 * math.exp(-20.0)))
    assert found.logprobs[0, 1].item() == pytest.approx(exact, abs=2e-6)


# --- vLLM itself.
NEEDS_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"
)
# vLLM's own imports use what their authors have deprecated since.
ITS_WARNINGS = pytest.mark.filterwarnings("ignore")
TOP = 5
RECORDED: Recorded = {**KEPT_SETS, **LikeliestRecorder(TOP).columns()}
COLUMNS: Columns = {name: recording.column for name, recording in RECORDED.items()}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    folder = tmp_path_factory.mktemp("model")
    save_model(lively(), folder)
    TOKENIZER.save_pretrained(folder)
    # Fewer rows than requests: some wait.
    options = VllmOptions(max_model_len=256, log_file=str(folder / "vllm.log"), max_rows=6)
    engine = VllmEngine(str(folder), options, columns=COLUMNS)
    yield engine
    engine.close()


def requests() -> list[Request]:
    """Of every kind of cut in one batch."""
    plain = {"max_tokens": 14, "stop_token_ids": ()}
    kinds: dict[str, dict[str, Any]] = {
        "plain ": {"temperature": 1.2},
        "k ": {"top_k": 40, "temperature": 0.8},
        "few ": {"top_k": 3},
        "all ": {"top_k": 30, "top_p": 0.8, "min_p": 0.01},
        "greedy ": {"temperature": 0.0, "top_k": 9, "min_p": 0.9},
    }
    made = [make_requests(3, 2, prefix=name, **plain, **more) for name, more in kinds.items()]
    return [request for one_of_each in zip(*made, strict=True) for request in one_of_each]


def numbers_of(columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    codes = {KEPT: "i", HEAD_IDS: "i", HEAD_LOGPROBS: "f"}
    found: dict[str, list[Any]] = {
        name: [array(code, entry).tolist() for entry in columns[name]]
        for name, code in codes.items()
    }
    return found | {HEAD_REST: list(columns[HEAD_REST])}


def check_alike(ours: TokenRun, theirs: TokenRun, name: str) -> None:
    """The same tokens, sets and heads; log-probabilities up to rounding."""
    assert ours.token_ids == theirs.token_ids
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
    one, other = numbers_of(ours.columns), numbers_of(theirs.columns)
    assert one[KEPT] == other[KEPT]
    assert all(one[KEPT]) == (not name.startswith(("plain", "greedy")))
    for at, (head, expected) in enumerate(
        zip(one[HEAD_LOGPROBS], other[HEAD_LOGPROBS], strict=True)
    ):
        there = [value for value in expected if value > NO_CHANCE]
        assert head == pytest.approx(expected, rel=1e-6, abs=2e-5)
        assert one[HEAD_IDS][at][: len(there)] == other[HEAD_IDS][at][: len(there)]
    assert one[HEAD_REST] == pytest.approx(other[HEAD_REST], rel=1e-6, abs=1e-4)


@NEEDS_VLLM
@ITS_WARNINGS
def test_vllm_records_what_the_local_sampler_does(engine: Any) -> None:
    model = lively()
    engine.update_weights(buckets(model.named_parameters()), 0)
    asked = requests()
    local = LocalSampler(model, TOKENIZER, max_rows=6, recorded=RECORDED)
    expected = generate(local, asked, deadline_s=120)
    found = generate(engine, asked, deadline_s=120)
    for request, ours, theirs in zip(asked, found, expected, strict=True):
        [one], [other] = ours.segments, theirs.segments
        check_alike(one, other, request.id)
        if request.id.startswith("few"):
            assert all(rest <= NO_CHANCE for rest in one.columns[HEAD_REST])


@NEEDS_VLLM
@ITS_WARNINGS
@pytest.mark.parametrize("cut", [1, 5, 9])
def test_columns_stay_at_their_tokens_where_a_request_is_parked_and_goes_on(
    engine: Any, cut: int
) -> None:
    """Weights arrive in the middle, and all goes through JSON and into the engine again."""
    asked = requests()
    named = {one.id: one for one in asked}
    recorded: list[dict[str, Any]] = []
    for parked in (False, True):
        engine.update_weights(buckets(lively().named_parameters()), 0)
        engine.round = 0
        engine.submit(asked)
        done = {item.request.id: item.completion for item in run_to(engine, cut)}
        if parked:
            state = through_json(engine.state())
            engine.restore(state, named)
        engine.update_weights(buckets(lively(seed=1).named_parameters()), 1)
        while in_flight_of(engine.state()):
            ended = run_to(engine, engine.round + 1)
            done |= {item.request.id: item.completion for item in ended}
        recorded.append(done)
    whole, again = recorded
    assert whole.keys() == again.keys() == named.keys()
    for id in named:
        [one], [other] = again[id].segments, whole[id].segments
        assert one.versions == other.versions
        check_alike(one, other, id)
