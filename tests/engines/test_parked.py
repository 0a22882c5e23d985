"""Parked requests: polls that end at a round, and what is in flight as JSON and back.

Every sampler of oxRL: a run is cut at every one of its rounds, and a new sampler that gets what was
in flight goes on to the bytes of the run that was not cut.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest

from oxrl.engines.sample import Responses
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.errors import DeadlineError, EngineError
from oxrl.types import Sampling, TokenRun
from support.parked import (
    OTHER,
    TINY_VISION,
    Kind,
    go_on,
    in_flight_of,
    new_engine,
    rest,
    run_to,
    text,
    through_json,
    tiny,
    vision,
)
from support.samplers import TOKENIZER, make_requests, trainer_logprobs
from support.toy_columns import TOYS
from support.vision_families import write_family
from support.vision_runs import write_rows

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    """Kinds by their name."""
    folder = tmp_path_factory.mktemp("vision")
    write_rows(folder)

    def made(name: str) -> Kind:
        sampler, _, how = name.partition(" ")
        if sampler == "vision":
            model = TINY_VISION if how == "" else str(write_family(how, folder / how))
            return vision(folder, model, still=how == "")
        return text(sampler, columns=how == "columns")

    return made


KINDS = ("local", "local columns", "cached", "cached columns", "vision", "vision qwen2_5_vl")


@pytest.mark.parametrize("name", KINDS)
def test_a_new_sampler_goes_on_from_every_round_to_the_same_bytes(
    kinds: Callable[[str], Kind], name: str
) -> None:
    kind = kinds(name)
    other = new_engine(kind)
    cut = 0
    while True:
        engine = new_engine(kind)
        engine.submit(kind.requests)
        before = run_to(engine, cut)
        state = engine.state()
        in_flight = len(kind.requests) - len(before)
        assert state["round"] == engine.round <= cut
        assert in_flight_of(state) == in_flight
        # One that is new, and at every third round one that has other rows in flight.
        if cut % 3:
            other = new_engine(kind)
        else:
            other.submit([replace(one, id=f"gone {one.id}") for one in kind.requests])
            run_to(other, other.round + 3)
            kind.deliver(other, 0)
        other.restore(through_json(state), kind.named)
        assert other.state() == state
        for sampler in (engine, other):
            kind.deliver(sampler, OTHER)
        assert go_on(engine) == go_on(other)
        if not in_flight:
            break
        cut += 1
    assert cut > 10


@pytest.mark.parametrize("name", ["local", "cached"])
def test_a_poll_stops_at_its_round_and_at_a_response_before_it(
    kinds: Callable[[str], Kind], name: str
) -> None:
    engine = new_engine(kinds(name))
    requests = make_requests(2, max_tokens=12, stop_token_ids=())
    engine.submit([*requests, replace(requests[0], id="short", sampling=Sampling(max_tokens=4))])
    # A row's first round samples two tokens: after its prompt, and by a decode step.
    assert engine.poll(60, 2) == [] and engine.round == 2
    assert engine.poll(60, 2) == [] and engine.round == 2
    assert engine.poll(60, 1) == [] and engine.round == 2
    assert [item.request.id for item in engine.poll(60, 9)] == ["short"]
    assert engine.round == 3
    # A round that is reached late is reached; one that is not is a missed deadline.
    assert engine.poll(0.0, 4) == [] and engine.round == 4
    with pytest.raises(DeadlineError):
        engine.poll(0.0, 6)
    assert engine.round == 5
    assert len(rest(engine)) == 2 and engine.round == 11
    assert engine.poll(60, 20) == [] and engine.round == 11  # nothing is left


@pytest.mark.parametrize("name", KINDS[:5])
def test_what_is_parked_for_other_requests_goes_on_as_if_nothing_had_been(
    kinds: Callable[[str], Kind], name: str
) -> None:
    kind = kinds(name)
    engine, other = new_engine(kind), new_engine(kind)
    for sampler in (engine, other):
        sampler.submit(kind.requests)
        run_to(sampler, 4)
    state = other.state()
    other.abort([*kind.named])
    asked = [replace(request, id=f"asked {request.id}") for request in kind.requests]
    assert len(generate(other, asked, deadline_s=60)) == len(asked)
    other.restore(state, kind.named)
    for sampler in (engine, other):
        kind.deliver(sampler, OTHER)
    assert go_on(engine) == go_on(other)


@pytest.mark.parametrize("name", KINDS[:4])
def test_every_token_has_the_log_probability_of_its_own_version(
    kinds: Callable[[str], Kind], name: str
) -> None:
    kind = kinds(name)
    engine = new_engine(kind)
    requests = make_requests(5, 2, words=2, max_tokens=12, temperature=1.3)
    requests += make_requests(2, prefix="greedy ", max_tokens=9, temperature=0.0)
    engine.submit(requests)
    done: Responses = []
    version = 0
    while len(done) < len(requests):
        done += run_to(engine, engine.round + 4)
        version += 1
        if version % 2:  # parked in between, which changes nothing
            engine.restore(through_json(engine.state()), {one.id: one for one in requests})
        kind.deliver(engine, version)
    check_versions(kind, done, version)


def check_versions(kind: Kind, done: Responses, last: int) -> None:
    """Each token's log-probability is that of the weights of its version, scored afresh."""
    segments = [item.completion.segments[0] for item in done]
    mixed = [segment for segment in segments if len(set(segment.versions)) > 1]
    assert 3 * len(mixed) >= len(done) and last > 2
    for temperature in {item.request.sampling.temperature for item in done}:
        chosen = [item for item in done if item.request.sampling.temperature == temperature]
        requests = [item.request for item in chosen]
        completions = [item.completion for item in chosen]
        scores: dict[int, list[list[float]]] = {}
        for version in range(last):
            model = deepcopy(tiny())
            model.load_state_dict({**kind.weights(version)}, strict=False)
            scores[version] = trainer_logprobs(model, requests, completions, temperature or 1.0)
        for row, completion in enumerate(completions):
            segment = completion.segments[0]
            expected = [scores[v][row][at] for at, v in enumerate(segment.versions)]
            assert segment.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    kinds: Callable[[str], Kind],
) -> None:
    kind = kinds("local columns")
    engine = new_engine(kind)
    engine.submit(kind.requests)
    run_to(engine, 3)
    state = through_json(engine.state())
    first = state["rows"][0][0]["id"]
    fewer = {id: request for id, request in kind.named.items() if id != first}
    small = LocalSampler(tiny(), TOKENIZER, max_rows=3, recorded=TOYS)
    plain = LocalSampler(tiny(), TOKENIZER, max_rows=5)
    damaged = through_json(state)
    damaged["rows"][0][0]["columns"]["trace"][0] = "no base64"
    cut = through_json(state)
    cut["rows"][0][0]["columns"]["trace"][0] = "AAAAAAAA"  # six bytes, not three
    for sampler, given, named, says in (
        (engine, state, fewer, f"1 requests that it is not restored with, such as '{first}'"),
        (
            small,
            state,
            kind.named,
            "has 5 rows, and this one decodes 3 .*inference_engine.max_rows",
        ),
        (plain, state, kind.named, r"columns \['position', 'trace'\] .* this one records \[\]"),
        (
            engine,
            damaged,
            kind.named,
            f"request '{first}': an entry of column 'trace' is no base64",
        ),
        (engine, cut, kind.named, f"request '{first}': "),
    ):
        before = sampler.state()
        with pytest.raises(EngineError, match=says):
            sampler.restore(given, named)
        assert sampler.state() == before
    engine.abort([*kind.named])
    full = replace(
        kind.requests[0], prefix=TokenRun(token_ids=(5,), logprobs=(0.0,), versions=(0,))
    )
    engine.submit([replace(full, sampling=Sampling(max_tokens=1))])
    with pytest.raises(EngineError, match="1 requests have finished and were not polled, such as"):
        engine.state()
