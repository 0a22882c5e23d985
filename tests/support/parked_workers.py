"""What samplers in several processes do with parked requests, whoever starts the processes: rounds
are cut, processes die in every moment of a window, and the rest is as if nothing had been.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oxrl.engines.sample.workers import RolloutWorkers
from oxrl.errors import EngineError
from oxrl.types import Request
from support.parked import (
    OTHER,
    TINY_VISION,
    Kind,
    by_id,
    go_on,
    in_flight_of,
    run_to,
    text,
    through_json,
    vision,
)
from support.sampling_processes import parent_of
from support.vision_runs import write_rows


def kind_called(name: str, folder: Path) -> Kind:
    """A sampler by its name, such as "cached" or "local columns"."""
    sampler, _, how = name.partition(" ")
    if sampler != "vision":
        return text(sampler, columns=how == "columns")
    write_rows(folder)
    return vision(folder, TINY_VISION, still=True)


def again(kind: Kind, engine: Any) -> None:
    """Leave an engine as it was at the start."""
    engine.abort([*kind.named])
    kind.deliver(engine, 0)
    engine.round = 0


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


def without_retried(found: Any) -> Any:
    """What was found, less which requests lost a process."""
    if isinstance(found, dict):
        return {name: without_retried(one) for name, one in found.items() if name != "retried"}
    return [without_retried(one) for one in found] if isinstance(found, list | tuple) else found


def check_goes_on(kind: Kind, engine: RolloutWorkers, other: RolloutWorkers) -> None:
    """Processes go on from several rounds to the bytes of those that were not cut."""
    for cut in (0, 1, 3, 6, 9):
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


def check_losses(kind: Kind, engine: RolloutWorkers) -> None:
    """Whatever a process dies over, the rest is as if nobody had."""
    expected: list[Any] = []
    for moment in MOMENTS:
        again(kind, engine)
        counted(engine)
        found = sampled(kind, engine, moment)
        expected = expected or found
        assert without_retried(found) == without_retried(expected), moment
    answered = [expected[at] for at in (2, 3, 5, 6)]
    assert any(answered)  # and a process that died was asked for some of it again


def check_second_loss(kind: Kind, engine: RolloutWorkers) -> None:
    """Requests that lose a second process in windows end the run."""
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
