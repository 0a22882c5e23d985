"""One run of `overlap.py`: samplers and a trainer that sleep, around a source of rollouts.

    python benchmarks/overlap_side.py SOURCE --lag 4 --processes 1 --rounds 60 --batches 24

It is run with the code of today and with that of the commit before sampling went on. Prints one
JSON object: seconds of every batch, and what else was measured.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from overlap_work import BATCH, CAP, GROUP, SLOTS, length_of, round_seconds

from oxrl.models.lazy_transformers import import_model_classes

import_model_classes()  # as commands and hosts do, before anything below imports them

from oxrl.engines.sample.hosted import ThisMachine  # noqa: E402
from oxrl.engines.sample.local import LocalSampler  # noqa: E402
from oxrl.engines.sample.workers import RolloutWorkers  # noqa: E402
from oxrl.models.load import load_policy, load_tokenizer  # noqa: E402
from oxrl.rollouts.sync import PromptRequests, RolloutParts, SyncRollouts  # noqa: E402
from oxrl.runs.clock import Clock  # noqa: E402
from oxrl.tables.watch import Deadlines  # noqa: E402
from oxrl.types import Metrics, Prompt, Request, Sampling, Score  # noqa: E402

MODEL = "builtin:tiny"
DEADLINE_S = 120.0


class Prompts:
    """Prompts of three tokens, in the order of their draws."""

    def __len__(self) -> int:
        return 10**6

    def at(self, draw: int, *, seed: int) -> Prompt:
        return Prompt(uid=str(draw), messages=(), token_ids=(5 + draw % 200, 7, 9))


class SleepingSampler(LocalSampler):
    """Its responses end at lengths that nobody else knows, and its rounds take as long as said."""

    # Times as fast as said.
    faster = 1.0

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([with_length(request) for request in requests])

    def _work(self) -> None:
        started = time.monotonic()
        before = len(self._slots.requests)
        super()._work()
        rows = max(before, len(self._slots.requests))
        wanted = round_seconds(rows) / self.faster
        time.sleep(max(0.0, started + wanted - time.monotonic()))


def with_length(request: Request) -> Request:
    """The same request, whose response ends at its own length."""
    length = length_of(request.draw, request.sample)
    return replace(request, sampling=replace(request.sampling, max_tokens=length))


def build(faster: float) -> SleepingSampler:
    """Make the sampler of a process."""
    torch.set_num_threads(1)
    sampler = SleepingSampler(load_policy(MODEL), load_tokenizer(MODEL), max_rows=SLOTS)
    sampler.faster = faster
    return sampler


def memory_mb(engine: object) -> float:
    """In the process of a sampler: the most memory that it ever held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [found] = [line for line in lines if line.startswith("VmHWM")]
    return int(found.split()[1]) / 1024


class Scorer:
    """Every response is worth the same, and that takes no time."""

    def score(self, groups: Sequence[Any], patience: object = None) -> list[list[Score]]:
        return [[Score(value=1.0) for _ in completions] for _, completions in groups]


@dataclass
class Weights:
    """A Delivery of weights that change with every version, and how long it takes."""

    sampler: Any
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._named = dict(load_policy(MODEL).named_parameters())

    def deliver(self, version: int) -> None:
        started = time.monotonic()
        changed = [(name, t.detach() * (1 + 1e-3 * version)) for name, t in self._named.items()]
        self.sampler.update_weights([changed], version)
        self.seconds.append(time.monotonic() - started)

    def remember(self, rollouts: object) -> Metrics:
        return {}


def parts_of(sampler: Any, weights: Weights, prompts: int) -> RolloutParts:
    """What a source works with, then and now."""
    given: dict[str, Any] = {
        "sampler": sampler,
        "delivery": weights,
        "scorer": Scorer(),
        "requests": PromptRequests(
            Prompts(), samples=GROUP, sampling=Sampling(max_tokens=CAP), run_seed=1, baseline=False
        ),
        "clock": Clock(),
        "prompts_per_step": prompts,
        "stop": lambda: False,
        "deadline_s": DEADLINE_S,
        "max_error_rate": 0.5,
    }
    known = inspect.signature(RolloutParts).parameters
    return RolloutParts(**{name: value for name, value in given.items() if name in known})


def source_of(options: argparse.Namespace, parts: RolloutParts, weights: Weights) -> Any:
    """The source that is measured; none of them is both then and now, but for the first."""
    common: Mapping[str, Any] = {
        "updates": 1,
        "rollout_steps": options.batches,
        "background": True,
    }
    if options.source == "sequential":
        return SyncRollouts(parts)
    if options.source == "waves":
        waves = import_module("oxrl.rollouts.async_rollouts").AheadRollouts
        block = (options.lag + 1) // 2
        return waves(parts, weights, block=block, capacity=10**9, **common)
    if options.source == "free":
        free = import_module("oxrl.rollouts.free").FreeRollouts
        path = Path(options.folder) / "schedule.jsonl"
        return free(parts, parts.sampler, ahead=options.lag, path=path, **common)
    logical = import_module("oxrl.rollouts.continuous").ContinuousRollouts
    return logical(parts, parts.sampler, ahead=options.lag, rounds=options.rounds, **common)


def timed(owner: Any, name: str) -> list[float]:
    """Have the calls of a method of an object timed: their seconds, as they come."""
    plain = getattr(owner, name)
    seconds: list[float] = []

    def call(*inputs: Any) -> Any:
        started = time.monotonic()
        try:
            return plain(*inputs)
        finally:
            seconds.append(time.monotonic() - started)

    setattr(owner, name, call)
    return seconds


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Sample and train all batches."""
    with ExitStack() as stack:
        options.folder = stack.enter_context(TemporaryDirectory())
        made = partial(build, options.faster)
        if options.processes:
            machine = ThisMachine(1)
            stack.callback(machine.close)
            waits = Deadlines.alike(DEADLINE_S)
            sampler: Any = RolloutWorkers(machine, [None] * options.processes, made, waits)
        else:
            sampler = made()
        stack.callback(sampler.close)
        weights = Weights(sampler)
        parts = parts_of(sampler, weights, BATCH * max(1, options.processes) // GROUP)
        source = source_of(options, parts, weights)
        stack.callback(source.close)
        snapshots = timed(sampler, "state") if hasattr(sampler, "state") else []
        # Then, the loop of a run delivered.
        delivers = "delivery" not in inspect.signature(RolloutParts).parameters
        digest = hashlib.sha256()
        seconds: list[float] = []
        waited: list[float] = []
        draw = 0
        for batch in range(options.batches):
            started = time.monotonic()
            if delivers and source.idle:
                weights.deliver(batch)
            found = source.next(draw, step=batch)
            draw = found.next_draw
            waited.append(time.monotonic() - started)
            time.sleep(options.train_s / options.faster)
            seconds.append(time.monotonic() - started)
            for rollout in found.rollouts:
                run_of = rollout.completion.segments[0]
                digest.update(repr((run_of.token_ids, run_of.versions)).encode())
        members = getattr(sampler, "workers", ())
        return {
            "seconds": seconds,
            "waited": waited,
            "snapshots": snapshots,
            "deliveries": weights.seconds,
            "memory_mb": max((worker.call(memory_mb) for worker in members), default=None),
            "samples": digest.hexdigest()[:12],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", choices=("sequential", "waves", "logical", "free"))
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--processes", type=int, default=0, help="0: a thread of this process")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--train-s", type=float, required=True)
    parser.add_argument("--faster", type=float, default=1.0, help="divides all times")
    json.dump(run(parser.parse_args()), sys.stdout)


if __name__ == "__main__":
    main()
