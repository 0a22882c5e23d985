"""RayRollouts: several rollout actors presented as one RolloutEngine.

Each actor hosts an engine of its own. A response depends on its request alone (per-request seeds),
so it does not matter who samples it, or whether somebody died over it before.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from oxrl.engines.ray.cluster import LOAD_S, Cluster, Lost, Place, answer, pack, unpack
from oxrl.engines.sample.base import Finished, RolloutEngine
from oxrl.engines.train.base import Bucket
from oxrl.errors import DeadlineError, EngineError, WeightSyncError
from oxrl.types import Metrics, Request

log = logging.getLogger(__name__)

# An actor reports back at least this often while it samples, so that silence means something.
POLL_S = 1.0
CLOSE_S = 5.0
# Actors that hold the same weights may say this much (nats) differently of the same row: bfloat16
# rounding.
AGREEMENT = 0.1


class SamplerActor:
    """The process around one engine."""

    def build(self, directory: str, build: Callable[[], RolloutEngine]) -> int:
        """Make the engine, where the driver's relative paths mean the same; returns its weight
        version.
        """
        os.chdir(directory)
        self._engine = build()
        return self._engine.version

    def call(self, name: str, *arguments: Any) -> Any:
        """A method or a property of the engine."""
        found = getattr(self._engine, name)
        return found(*arguments) if callable(found) else found

    def poll(self, seconds: float) -> list[Finished]:
        try:
            return self._engine.poll(seconds)
        except DeadlineError:
            return []  # still sampling; how long is too long is for the caller to say

    def update_weights(self, references: Sequence[Any], version: int) -> Mapping[str, str]:
        import ray  # pyright: ignore[reportMissingImports]  (an extra)

        return self._engine.update_weights(
            (unpack(ray.get(reference)) for reference in references),  # pyright: ignore
            version,
        )


class _Worker:
    """An actor as the driver sees it: what it owes, and the poll that it is working on. `call`
    raises Lost.
    """

    def __init__(self, group: RayRollouts, number: int, place: Place) -> None:
        self.name, self._group, self._place = f"rollout actor {number}", group, place
        self.owed: dict[str, Request] = {}
        self.start()

    def start(self) -> None:
        """A new actor, which begins to load its model."""
        self.actor = self._group.cluster.start(SamplerActor, self._place)
        self.poll, self.asked = None, 0.0
        self._loading = self.actor.build.remote(os.getcwd(), self._group.build)

    def loaded(self) -> int:
        """The weight version that a new actor starts with."""
        return self.answer(self._loading, "load its model", LOAD_S)

    def answer(self, reference: Any, asked: str, at_least_s: float = 0.0) -> Any:
        what, deadline_s = (
            f"{self.name}, asked to {asked},",
            max(at_least_s, self._group.deadline_s),
        )
        return answer(self._group.cluster.ray, reference, what, deadline_s=deadline_s)

    def call(self, name: str, *arguments: Any) -> Any:
        """A method or a property of the actor's engine."""
        return self.answer(self.actor.call.remote(name, *arguments), name)

    # What the delivery proof asks of each; whoever is lost over it is replaced, as anywhere else.

    @property
    def version(self) -> int:
        return self._group.ask(self, "version")

    def logprobs(
        self, rows: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        return self._group.scores(self, rows, temperature)


class RayRollouts:
    """RolloutEngine over a cluster: the place of each actor, and the picklable function that builds
    its engine there.

    An actor that dies or hangs is replaced: the new one gets the current weights, has to prove that
    it holds them, and samples again what the old one still owed. A request that loses a second
    actor ends the run.

    Args:
        sleeping: whether actors sleep while nothing is being sampled, because a training rank needs
            their memory.
        deadline_s: longest wait for an actor's answer; one that is silent for half of it while it
            samples is replaced.
    """

    def __init__(
        self,
        cluster: Cluster,
        places: Sequence[Place],
        build: Callable[[], RolloutEngine],
        *,
        deadline_s: float,
        sleeping: bool = False,
    ) -> None:
        self.cluster, self.build, self.deadline_s, self._sleeping = (
            cluster,
            build,
            deadline_s,
            sleeping,
        )
        self._workers = [_Worker(self, number, place) for number, place in enumerate(places)]
        self._retried: set[str] = set()
        self._asleep = False
        self._replaced = 0
        # The last weights stay in the object store, for replacements.
        self._weights: list[Any] = []
        self._fingerprints: Mapping[str, str] = {}
        # What was last scored with them: (rows, temperature, logprobs).
        self._probe: tuple[Sequence[Sequence[int]], float, list[list[float]]] | None = None
        self._version = max(worker.loaded() for worker in self._workers)

    @property
    def version(self) -> int:
        return self._version

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine. Samples of one prompt go to one actor, which computes the prompt
        once.
        """
        held = {id for worker in self._workers for id in worker.owed}
        twice = next((request.id for request in requests if request.id in held), None)
        if twice is not None:
            raise EngineError(f"request id {twice!r} is already being sampled")
        self._set_asleep(False)
        for _, group in itertools.groupby(requests, key=lambda request: request.prompt.token_ids):
            chosen, worker = list(group), min(self._workers, key=_tokens_owed)
            self.ask(worker, "submit", chosen)
            worker.owed.update((request.id, request) for request in chosen)

    def poll(self, deadline_s: float) -> list[Finished]:
        end = time.monotonic() + deadline_s
        finished: list[Finished] = []
        while not finished and (busy := [worker for worker in self._workers if worker.owed]):
            for worker in busy:
                if worker.poll is None:
                    worker.poll, worker.asked = (
                        worker.actor.poll.remote(min(POLL_S, deadline_s)),
                        time.monotonic(),
                    )
            polls = [worker.poll for worker in busy]
            self.cluster.ray.wait(polls, timeout=POLL_S)
            ready, _ = self.cluster.ray.wait(polls, num_returns=len(polls), timeout=0)
            for worker in busy:
                if worker.poll in ready:
                    finished += self._collect(worker)
                elif (silent := time.monotonic() - worker.asked) > self.deadline_s / 2:
                    self._replace(
                        worker, Lost(f"{worker.name} has not answered for {silent:.1f} s")
                    )
                    end = time.monotonic() + deadline_s
            # Somebody who is silent is waited for: either it answers or it is replaced.
            answering = all(worker.poll is None or worker.poll in ready for worker in busy)
            if not finished and answering and time.monotonic() > end:
                raise DeadlineError(
                    f"waited {deadline_s:g} s for a sampled response: rollout actors answer, and owe "
                    f"{[len(worker.owed) for worker in self._workers]} responses each. Raise run.deadline_s or lower "
                    "rollout.max_tokens"
                )
        self._sleep_if_idle()
        return finished

    def _collect(self, worker: _Worker) -> list[Finished]:
        """What a finished poll brought; nothing if the actor died over it and was replaced."""
        reference, worker.poll = worker.poll, None
        try:
            found: list[Finished] = worker.answer(reference, "poll")
        except Lost as lost:
            self._replace(worker, lost)
            return []
        for item in found:
            if worker.owed.pop(item.request.id, None) is None:
                raise EngineError(
                    f"{worker.name} returned {item.request.id!r}, which it does not owe"
                )
            self._retried.discard(item.request.id)
        return found

    def abort(self, ids: Sequence[str]) -> list[Finished]:
        aborted: list[Finished] = []
        for worker in self._workers:
            wanted = [id for id in ids if id in worker.owed]
            aborted += self.ask(worker, "abort", wanted) if wanted else []
            for item in aborted:
                worker.owed.pop(item.request.id, None)
        self._retried.difference_update(item.request.id for item in aborted)
        self._sleep_if_idle()
        return aborted

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
        """See RolloutEngine. Each bucket enters the object store once, whatever the number of
        actors.

        Raises:
            WeightSyncError: actors do not hold the same tensors, or not this version.
        """
        self._set_asleep(False)
        # The old ones go first: the object store never holds two copies.
        self._weights, self._fingerprints, self._probe = [], {}, None
        self._weights += [self.cluster.ray.put(pack(bucket)) for bucket in buckets]
        self._version = version
        started = [
            (worker, worker.actor.update_weights.remote(self._weights, version))
            for worker in self._workers
        ]
        for worker, reference in started:
            try:
                self._prove(worker, worker.answer(reference, "update_weights"))
            except Lost as lost:
                self._replace(worker, lost)
        return self._fingerprints

    def _prove(self, worker: _Worker, fingerprints: Mapping[str, str]) -> None:
        """`worker` acknowledges the version, holds the tensors that every actor holds, and scores
        what they scored.
        """
        self._fingerprints = self._fingerprints or fingerprints
        version = worker.call("version")
        if version != self._version:
            raise WeightSyncError(f"{worker.name} serves version {version}, not {self._version}")
        names = self._fingerprints.keys() | fingerprints.keys()
        wrong = sorted(
            name for name in names if fingerprints.get(name) != self._fingerprints.get(name)
        )
        if wrong:
            raise WeightSyncError(
                f"{worker.name} holds other weights of version {version} than the others: {len(wrong)} tensors differ, "
                f"such as {wrong[:1]}"
            )
        if self._probe is not None:
            rows, temperature, expected = self._probe
            found = worker.call("logprobs", rows, temperature)
            pairs = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
            if not (worst := max(abs(a - b) for a, b in pairs)) <= AGREEMENT:
                raise WeightSyncError(
                    f"{worker.name} scores the last probe up to {worst:.3g} nats off"
                )

    def logprobs(
        self, rows: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """See RolloutEngine. Actor 0 answers; `members` are asked one by one."""
        return self.scores(self._workers[0], rows, temperature)

    @property
    def members(self) -> Mapping[str, _Worker]:
        """Every actor by name, for what has to be asked of each."""
        return {worker.name: worker for worker in self._workers}

    def scores(
        self, worker: _Worker, rows: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        """What one actor says of `rows`; kept, for replacements to be compared with."""
        self._set_asleep(False)
        scores: list[list[float]] = self.ask(worker, "logprobs", rows, temperature)
        self._probe = rows, temperature, scores
        return scores

    def metrics(self) -> Metrics:
        """See RolloutEngine: counts and rates are summed over actors, means averaged."""
        parts: list[Metrics] = [self.ask(worker, "metrics") for worker in self._workers]
        merged = {name: sum(part[name] for part in parts) for name in parts[0]}
        merged |= {
            name: value / len(parts)
            for name, value in merged.items()
            if "mean" in name or "frac" in name
        }
        replaced, self._replaced = self._replaced, 0
        return merged | {"rollout/replaced_actors": float(replaced)}

    def sleep(self) -> None:
        self._set_asleep(True)

    def wake(self) -> None:
        self._set_asleep(False)

    def close(self) -> None:
        """End every actor, after a moment for its engine's own processes; the cluster is its
        owner's to close.
        """
        closing = [worker.actor.call.remote("close") for worker in self._workers]
        self.cluster.ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for worker in self._workers:
            self.cluster.ray.kill(worker.actor)

    def _sleep_if_idle(self) -> None:
        if self._sleeping and not any(worker.owed for worker in self._workers):
            self._set_asleep(True)

    def _set_asleep(self, asleep: bool) -> None:
        if asleep != self._asleep:
            for worker in self._workers:
                self.ask(worker, "sleep" if asleep else "wake")
            self._asleep = asleep

    def ask(self, worker: _Worker, method: str, *arguments: Any) -> Any:
        """A call to an actor's engine; an actor that is lost over it is replaced and asked once
        more.
        """
        try:
            return worker.call(method, *arguments)
        except Lost as lost:
            self._replace(worker, lost)
            return worker.call(method, *arguments)

    def _replace(self, worker: _Worker, lost: Lost) -> None:
        """A new actor in the place of a lost one, with the current weights and what the old one
        still owed.
        """
        twice = sorted(self._retried & worker.owed.keys())
        if twice:
            raise EngineError(
                f"{lost}; {len(twice)} requests lost their second actor over it, such as {twice[0]!r}"
            )
        started = time.monotonic()
        self.cluster.ray.kill(worker.actor)
        worker.start()
        worker.loaded()
        if self._weights:
            update = worker.actor.update_weights.remote(self._weights, self._version)
            self._prove(worker, worker.answer(update, "update_weights"))
        if worker.owed:
            worker.call("submit", list(worker.owed.values()))
            self._retried |= worker.owed.keys()
        if self._asleep:
            worker.call("sleep")
        self._replaced += 1
        log.warning(
            "%s; replaced within %.1f s, with weights of version %d; %d requests are sampled again",
            *(lost, time.monotonic() - started, self._version, len(worker.owed)),
        )


def _tokens_owed(worker: _Worker) -> int:
    return sum(request.sampling.max_tokens for request in worker.owed.values())
