"""Parked requests of samplers in processes of their own: the contract of one sampler, also where a
process dies in the middle.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from oxrl.engines.ray.rollouts import RayRollouts
from oxrl.engines.sample.workers import RolloutWorkers
from oxrl.errors import EngineError
from oxrl.types import Request
from oxrl.usercode import worker as worker_module
from support.parked import (
    OTHER,
    TINY_VISION,
    Kind,
    by_id,
    go_on,
    in_flight_of,
    in_processes,
    new_engine,
    run_to,
    text,
    through_json,
    vision,
)
from support.sampling_processes import FORKING, parent_of
from support.vision_runs import write_rows

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
KINDS = ("local columns", "cached", "vision")
Started = Callable[[int], RolloutWorkers]


@pytest.fixture(autouse=True)
def _quick_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "subprocess", FORKING)


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    sampler, _, how = request.param.partition(" ")
    if sampler != "vision":
        return text(sampler, columns=how == "columns")
    write_rows(tmp_path)
    return vision(tmp_path, TINY_VISION, still=True)


@pytest.fixture
def started(kind: Kind) -> Iterator[Started]:
    """`started(count)` starts so many processes, which are ended after the test."""
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(in_processes(kind, count))


def again(kind: Kind, engine: Any) -> None:
    """Leave an engine as it was at the start."""
    engine.abort([*kind.named])
    kind.deliver(engine, 0)
    engine.round = 0


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_new_processes_go_on_from_a_round_to_the_same_bytes(kind: Kind, started: Started) -> None:
    engine, other = started(2), started(2)
    rounds = (0, 1, 3, 6, 9)
    for cut in rounds:
        again(kind, engine)
        engine.submit(kind.requests)
        before = run_to(engine, cut)
        assert engine.round == cut
        state = engine.state()
        in_flight = in_flight_of(state)
        assert 0 < in_flight == len(kind.requests) - len(before)
        # What the others had in flight goes.
        other.submit(kind.requests)
        run_to(other, other.round + 2)
        other.restore(through_json(state), kind.named)
        assert other.state() == state
        for sampler in (engine, other):
            kind.deliver(sampler, OTHER)
        # Both give further requests to the same workers.
        for sampler in (engine, other):
            sampler.submit(further(kind))
        assert go_on(engine) == go_on(other)


def further(kind: Kind, count: int = 3) -> list[Request]:
    return [replace(request, id=f"{request.id} later {count}") for request in kind.requests[:count]]


def end_first(engine: RolloutWorkers) -> None:
    """End the process of the first worker as a crash would."""
    process, _ = engine.workers[0].call(parent_of)
    os.kill(process, signal.SIGKILL)


MOMENTS = (
    "",
    "before weights",
    "after weights",
    "after requests",
    "between rounds",
    "in a round",
    "in a later window",
    "after the rounds",
)


def sampled(kind: Kind, engine: RolloutWorkers, killed: str) -> list[Any]:
    """All that comes of windows of rounds, in which a process dies at some moment, or none."""
    found: list[Any] = []

    def reach(moment: str) -> None:
        if moment == killed:
            end_first(engine)

    def window(until: int, moment: str = "") -> None:
        if moment == killed == "in a round":
            kill_while_sampling(engine)
        found.append(by_id(run_to(engine, until)))
        engine.round = until

    engine.submit(kind.requests)
    window(3)
    counted(engine)
    found.append(engine.state())
    reach("before weights")
    kind.deliver(engine, OTHER)
    reach("after weights")
    engine.submit(further(kind, 3))
    reach("after requests")
    window(4)
    reach("between rounds")
    window(6, "in a round")
    engine.submit(further(kind, 4))
    found.append(counted(engine))
    window(8)
    reach("in a later window")
    window(10)
    reach("after the rounds")
    found += [engine.state(), counted(engine)]
    kind.deliver(engine, OTHER + 1)
    return [*found, go_on(engine), counted(engine)]


def kill_while_sampling(engine: RolloutWorkers) -> None:
    """End the first process once, when its next poll was begun."""
    wait = engine.cluster.wait

    def killing(*inputs: Any, **named: Any) -> Any:
        os.kill(process, signal.SIGKILL)
        engine.cluster.wait = wait
        return wait(*inputs, **named)

    process, _ = engine.workers[0].call(parent_of)
    engine.cluster.wait = killing


def counted(engine: RolloutWorkers) -> dict[str, float]:
    """What the engines counted, but for times and processes."""
    metrics = engine.metrics()
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("throughput/", "rollout/replaced"))
    }


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_whatever_a_process_dies_over_the_rest_is_as_if_nobody_had(
    kind: Kind, started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started(2)
    expected: list[Any] = []
    for moment in MOMENTS:
        again(kind, engine)
        counted(engine)
        found = sampled(kind, engine, moment)
        expected = expected or found
        assert without_retried(found) == without_retried(expected), moment
    answered = [expected[at] for at in (2, 3, 5, 6)]
    assert any(answered)  # and a process that died was asked for some of it again
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(MOMENTS) - 1
    assert all("killed by signal 9" in text and "from round 3 on" in text for text in said)


def without_retried(found: Any) -> Any:
    """What was found, less which requests lost a process."""
    if isinstance(found, dict):
        return {name: without_retried(one) for name, one in found.items() if name != "retried"}
    return [without_retried(one) for one in found] if isinstance(found, list | tuple) else found


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_requests_that_lose_a_second_process_in_windows_end_the_run(
    kind: Kind, started: Started
) -> None:
    engine = started(2)
    engine.submit(kind.requests)
    run_to(engine, 3)
    engine.state()
    kind.deliver(engine, OTHER)
    end_first(engine)
    run_to(engine, 4)
    # A state says who has lost one: a run that is resumed knows it too.
    engine.restore(through_json(engine.state()), kind.named)
    end_first(engine)
    with pytest.raises(EngineError, match=r"[2-9] requests lost their second actor over it"):
        run_to(engine, 5)


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_without_a_state_or_after_older_weights_a_lost_process_samples_anew(
    kind: Kind, started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started(1)
    for state in (False, True):
        again(kind, engine)
        engine.submit(kind.requests)
        run_to(engine, 2)
        if state:
            engine.state()
            run_to(engine, 4)
        kind.deliver(engine, OTHER)  # what the state had was sampled on by weights that are gone
        end_first(engine)
        at = engine.round
        done = run_to(engine, at + 1)
        assert engine.round == at + 1
        while some := engine.poll(60):
            done += some
        versions = {v for item in done for v in item.completion.segments[0].versions if v >= 0}
        assert versions == {OTHER}
        assert caplog.records[-1].getMessage().endswith("requests are sampled again")


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_a_state_of_other_samplers_is_refused_and_changes_nothing(
    kind: Kind, started: Started
) -> None:
    here, engine = new_engine(kind), started(2)
    for sampler in (here, engine):
        sampler.submit(kind.requests)
        run_to(sampler, 2)
    alone, both = through_json(here.state()), through_json(engine.state())
    three = {**both, "workers": [*both["workers"], both["workers"][0]]}
    first = both["workers"][1]["rows"][0][0]["id"]
    fewer = {id: request for id, request in kind.named.items() if id != first}
    for sampler, state, named, says in (
        (here, both, kind.named, r"of 2 samplers .* inference_engine\.actors to 2"),
        (engine, alone, kind.named, r"of 0 .* there are 2: set inference_engine\.processes to 0"),
        (engine, three, kind.named, r"of 3 .* there are 2: set inference_engine\.processes to 3"),
        (engine, both, fewer, f"1 requests that it is not restored with, such as '{first}'"),
    ):
        before = sampler.state()
        with pytest.raises(EngineError, match=says):
            sampler.restore(state, named)
        assert sampler.state() == before
    assert RayRollouts.setting == "inference_engine.actors"


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_a_poll_that_goes_on_is_waited_for_and_no_state_is_given_before(
    kind: Kind, started: Started
) -> None:
    engine = started(2)
    engine.submit(kind.requests)
    state = engine.state()
    for worker in engine.workers:
        worker.start_poll(60, inf)
    with pytest.raises(EngineError, match="sampling process 0 is still sampling: poll until"):
        engine.state()
    assert engine.poll(60, 0)  # what was begun, and no further round
    while engine.poll(60, 0):
        pass
    assert all(worker.polling is None for worker in engine.workers)
    engine.workers[0].start_poll(60, inf)
    engine.restore(state, kind.named)  # what is being sampled is dropped
    assert engine.state() == state and engine.round == 0
