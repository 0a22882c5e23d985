"""A rollout engine in a process of this machine: the samples of one process, whoever dies over them.

The process serves the local sampler here, so that nothing but oxRL is needed.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.sample.hosted import ThisMachine
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.engines.sample.workers import RolloutWorkers
from oxrl.engines.train import Bucket
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import DataError, EngineError, WeightSyncError
from oxrl.models.fingerprints import fingerprint
from oxrl.models.weights import buckets
from oxrl.tables.watch import Deadlines
from oxrl.usercode import worker as worker_module
from support.command_line import WARM, forked
from support.samplers import TOKENIZER, lively, make_requests
from support.sampling_processes import FORKING, alive, gone_within, parent_of

pytestmark = pytest.mark.timeout(300)


def model(seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return lively("builtin:tiny", seed, dtype)


def sampler(seed: int = 0, dtype: torch.dtype = torch.float32) -> LocalSampler:
    torch.set_num_threads(1)
    return LocalSampler(model(seed, dtype), TOKENIZER, max_rows=8)


def bfloat16_sampler() -> LocalSampler:
    return sampler(dtype=torch.bfloat16)


def broken() -> RolloutEngine:
    raise DataError("no model of that name")


def crash(engine: Any) -> None:
    raise ZeroDivisionError("of the engine's own")


class Sleepy(LocalSampler):
    """Answers no poll."""

    def poll(self, deadline_s: float, until: float = inf) -> Any:
        time.sleep(3600)


def sleepy() -> LocalSampler:
    return Sleepy(model(0), TOKENIZER, max_rows=8)


class Stubborn(LocalSampler):
    """Does not get over a request: its process ends."""

    def poll(self, deadline_s: float, until: float = inf) -> Any:
        os._exit(3)


def stubborn() -> LocalSampler:
    return Stubborn(model(0), TOKENIZER, max_rows=8)


def weights_of(seed: int, limit: int = 10**9) -> Iterator[Bucket]:
    named = [(name, weight.detach()) for name, weight in model(seed).named_parameters()]
    return buckets(named, limit=limit)


def with_child(engine: Any) -> int:
    """In the process: start another one, as vLLM starts its workers."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RolloutWorkers]]:
    """Hosts for tests that end them; a fresh interpreter is that of `shared`."""
    monkeypatch.setattr(worker_module, "subprocess", FORKING)
    made: list[ThisMachine] = []

    def make(build: Any = sampler, waits: Deadlines | None = None) -> RolloutWorkers:
        machine = ThisMachine(threads=1)
        made.append(machine)
        return RolloutWorkers(machine, [None], build, waits or Deadlines.alike(60))

    yield make
    for machine in made:
        machine.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[RolloutWorkers]:
    """One for tests that end no process; with whatever weights the last one left."""
    machine = ThisMachine(threads=1)
    yield RolloutWorkers(machine, [None], sampler, Deadlines.alike(60))
    machine.close()


def test_a_process_samples_what_this_one_would_to_the_last_bit(shared: RolloutWorkers) -> None:
    shared.update_weights(weights_of(0), 0)
    requests = make_requests(8, 4, temperature=0.9)
    expected = generate(sampler(), requests, deadline_s=60)
    assert generate(shared, requests, deadline_s=60) == expected
    assert sum(completion.sampled for completion in expected) > 100


@pytest.mark.parametrize(
    ("build", "dtype"),
    [(sampler, torch.float32), (bfloat16_sampler, torch.bfloat16)],
    ids=["float32", "bfloat16"],
)
def test_delivered_weights_arrive_are_held_and_are_sampled_with(
    hosted: Callable[..., RolloutWorkers], shared: RolloutWorkers, build: Any, dtype: torch.dtype
) -> None:
    engine = shared if build is sampler else hosted(build)
    other = model(5, dtype)
    policy = LocalTrainer(other, TrainerOptions(lr=1e-3))
    options = SyncOptions(dtype=dtype, vocabulary=261, temperature=1.0, probe_tokens=128)
    sync = WeightSync(policy, engine, options, lambda: model(9, dtype))
    sync.deliver(3)
    said = sync.metrics()
    assert said["sync/retries"] == 0
    assert said["sync/probe_limit_share"] < 1
    assert engine.version == 3
    assert engine.held() == {name: fingerprint(w) for name, w in other.named_parameters()}
    requests = make_requests(4, 2)
    there = sampler(5, dtype)
    found = generate(engine, requests, deadline_s=60)
    assert [c.token_ids for c in found] == [
        c.token_ids for c in generate(there, requests, deadline_s=60)
    ]
    assert {version for c in found for part in c.segments for version in part.versions} == {3}


@pytest.mark.parametrize("limit", [20_000, 10**9])
def test_one_delivery_takes_the_place_of_the_other(shared: RolloutWorkers, limit: int) -> None:
    for seed in (4, 6):
        arrived = shared.update_weights(weights_of(seed, limit), seed)
        expected = {n: fingerprint(w) for n, w in model(seed).named_parameters()}
        assert arrived == shared.held() == expected
        assert shared.version == seed


def test_a_process_that_is_killed_is_named_and_another_one_samples_the_same(
    hosted: Callable[..., RolloutWorkers], caplog: pytest.LogCaptureFixture
) -> None:
    engine = hosted()
    engine.update_weights(weights_of(4), 2)
    held = engine.held()
    requests = make_requests(4, 2, max_tokens=60)
    expected = generate(engine, requests, deadline_s=60)
    [worker] = engine.members.values()
    [first, keeper] = worker.call(parent_of)
    assert Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1] == str(
        os.getpid()
    )
    engine.submit(requests)
    os.kill(first, signal.SIGKILL)
    done: dict[str, Any] = {}
    while len(done) < len(requests):
        done |= {item.request.id: item.completion for item in engine.poll(60)}
    assert [done[request.id] for request in requests] == expected
    assert engine.held() == held
    assert engine.version == 2
    assert engine.metrics()["rollout/replaced_actors"] == 1
    assert "sampling process 0, asked to" in caplog.text
    assert "killed by signal 9" in caplog.text
    assert gone_within([first, keeper], 5)


def test_requests_that_lose_a_second_process_end_the_run_with_a_reason(
    hosted: Callable[..., RolloutWorkers],
) -> None:
    engine = hosted(stubborn)
    engine.submit(make_requests(2))
    with pytest.raises(EngineError, match=r"exit code 3.*2 requests lost their second actor"):
        while True:
            engine.poll(30)


def test_a_process_that_says_nothing_for_too_long_is_replaced_or_ends_the_run(
    hosted: Callable[..., RolloutWorkers],
) -> None:
    waits = Deadlines({**Deadlines.alike(60).seconds, "rollout": 2.0})
    engine = hosted(sleepy, waits)
    engine.submit(make_requests(1))
    with pytest.raises(EngineError, match="sampling process 0 has not answered for"):
        while True:
            engine.poll(30)


def test_errors_of_the_engine_are_raised_here_as_what_they_are(
    hosted: Callable[..., RolloutWorkers], shared: RolloutWorkers
) -> None:
    with pytest.raises(DataError, match="no model of that name"):
        hosted(broken)
    [worker] = shared.members.values()
    with pytest.raises(EngineError, match="ZeroDivisionError: of the engine's own"):
        worker.call(crash)
    [request] = make_requests(1)
    nothing = dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, token_ids=()))
    with pytest.raises(EngineError, match="0 prompt tokens"):
        shared.submit([nothing])
    with pytest.raises(WeightSyncError, match="nowhere"):
        shared.update_weights([[("nowhere", torch.zeros(3))]], 1)


def test_what_it_started_ends_with_it(hosted: Callable[..., RolloutWorkers]) -> None:
    engine = hosted()
    [worker] = engine.members.values()
    [process, _] = worker.call(parent_of)
    child = worker.call(with_child)
    assert alive(child)
    engine.close()
    assert gone_within([process, child], 10)


def busy_parent(said: Connection) -> None:
    """In a process of its own: sample without end, and say which processes that takes."""
    worker_module.subprocess = FORKING
    engine = RolloutWorkers(ThisMachine(threads=1), [None], sampler, Deadlines.alike(60))
    [worker] = engine.members.values()
    process, _ = worker.call(parent_of)
    said.send([process, worker.call(with_child)])
    engine.submit(make_requests(8, 8, max_tokens=200))
    while True:
        engine.poll(60)
        time.sleep(0.1)


def test_kill_9_of_the_parent_leaves_no_process_behind() -> None:
    ours, theirs = WARM.Pipe()
    parent = forked(busy_parent, theirs)
    parent.start()
    theirs.close()
    left = ours.recv()
    assert len(left) == 2 and all(map(alive, left))
    parent.kill()
    parent.join(30)
    assert parent.exitcode == -signal.SIGKILL
    assert gone_within(left, 15)
