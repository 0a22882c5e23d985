"""RayRollouts: rollout workers in Ray actors, on the machines of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from oxrl.engines.ray.cluster import enter, node_address, unpack
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.sample.workers import (
    BuildEngine,
    EngineActor,
    RolloutWorkers,
    Weights,
)
from oxrl.engines.train import Bucket, Fingerprints
from oxrl.engines.transport.base import LineError
from oxrl.engines.transport.ends import Devices, InProcess, Receives
from oxrl.engines.transport.line import Meeting, Seats
from oxrl.errors import LostActorError


class RolloutActor(EngineActor):
    """An engine's process as a Ray actor, which training ranks may send weights to."""

    def build(self, directory: str, build: BuildEngine) -> int:
        version = super().build(directory, build)
        self._end = end_of(self._engine)
        return version

    def enter(self, directory: str) -> None:
        enter(directory)

    def fetch(self, reference: Any) -> Bucket:
        import ray  # pyright: ignore[reportMissingImports]  (an extra)

        return unpack(ray.get(reference))  # pyright: ignore[reportAttributeAccessIssue]

    def where(self) -> Devices:
        """Return the devices where weights arrive."""
        return self._end.devices

    def join(self, meeting: Meeting, seats: Seats) -> None:
        """Meet the training ranks."""
        self._end.join(meeting, seats, node_address())

    def receive(self, version: int) -> Fingerprints:
        """Load what the training ranks send."""
        return self._end.receive(version)


class RayRollouts(RolloutWorkers):
    """Rollout workers in a cluster, to which training ranks may send weights by themselves."""

    noun = "rollout actor"
    setting = "inference_engine.actors"
    actor = RolloutActor

    def finish_each(self, begun: Sequence[Any], what: str) -> tuple[list[Any], str]:
        """Collect every worker's answer to a call that they work on together.

        Returns:
            (the answers, what broke the connection between them; empty: nothing did). A worker that
            is lost over it is replaced.
        """
        answers: list[Any] = []
        broken = ""
        for worker, reference in zip(self.workers, begun, strict=True):
            try:
                answers.append(worker.result(reference, what, "sync"))
            except LostActorError as lost:
                broken = broken or str(lost)
                self._replace(worker, lost)
            except LineError as error:
                broken = broken or f"{worker.name}: {error}"
        return answers, broken

    def received(self, answers: Sequence[Fingerprints], weights: Weights) -> Fingerprints:
        """Note that every worker has loaded what was sent to all, and prove it of each.

        Args:
            answers: the fingerprints of each.
            weights: where replacements find what was sent.
        """
        self._weights = weights
        for worker, fingerprints in zip(self.workers, answers, strict=True):
            try:
                self._prove(worker, fingerprints)
            except LostActorError as lost:
                self._replace(worker, lost)
        return self._fingerprints


def end_of(engine: RolloutEngine) -> Receives:
    """Return an engine as the end of lines: itself, where processes of its own receive."""
    if hasattr(engine, "receive"):
        return cast("Receives", engine)
    return InProcess(engine)
