"""Parked requests of samplers in processes of their own: the contract of one sampler, also where a
process dies in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import inf
from pathlib import Path

import pytest

from oxrl.engines.ray.rollouts import RayRollouts
from oxrl.engines.sample.workers import RolloutWorkers
from oxrl.errors import EngineError
from oxrl.usercode import worker as worker_module
from support.parked import (
    OTHER,
    Kind,
    in_processes,
    new_engine,
    run_to,
    through_json,
)
from support.parked_workers import (
    MOMENTS,
    again,
    check_goes_on,
    check_losses,
    check_second_loss,
    end_first,
    kind_called,
)
from support.sampling_processes import FORKING

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
KINDS = ("local columns", "cached", "vision")
Started = Callable[[int], RolloutWorkers]


@pytest.fixture(autouse=True)
def _quick_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "subprocess", FORKING)


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return kind_called(request.param, tmp_path)


@pytest.fixture
def started(kind: Kind) -> Iterator[Started]:
    """`started(count)` starts so many processes, which are ended after the test."""
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(in_processes(kind, count))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_new_processes_go_on_from_a_round_to_the_same_bytes(kind: Kind, started: Started) -> None:
    check_goes_on(kind, started(2), started(2))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_whatever_a_process_dies_over_the_rest_is_as_if_nobody_had(
    kind: Kind, started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    check_losses(kind, started(2))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(MOMENTS) - 1
    assert all("killed by signal 9" in text and "from round 3 on" in text for text in said)


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_requests_that_lose_a_second_process_in_windows_end_the_run(
    kind: Kind, started: Started
) -> None:
    check_second_loss(kind, started(2))


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
