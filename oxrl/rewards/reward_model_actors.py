"""Reward models in Ray actors: beside a policy that several processes train, on GPUs of their own.

A group goes to whichever actor is free; its scores depend on the group alone, so it does not matter
which. An actor that dies is replaced, and the group it was at is scored again, once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import monotonic
from typing import Any

from oxrl.engines.ray.cluster import Cluster, Place, bundle, enter
from oxrl.errors import LostActorError, OxrlError, RewardDefinitionError
from oxrl.rewards.failures import failed_group, named_failures
from oxrl.rewards.model_pool import BuildModel, RewardModelPool
from oxrl.runs.threads import in_threads
from oxrl.runs.waiting import Patience
from oxrl.tables.watch import LEAST_LOAD_S, Deadline
from oxrl.types import Group, Score, Scores

log = logging.getLogger(__name__)

# Reading a reward model, and what is left of a call that is over.
LOAD = Deadline("load", LEAST_LOAD_S)

OpenCluster = Callable[[], Cluster]


class RewardModelActor:
    """The process around one reward model."""

    def build(self, directory: str, build: BuildModel) -> None:
        """Load the model, where the driver's relative paths mean the same.

        Args:
            directory: that the driver works in.
            build: loads it.
        """
        enter(directory)
        self._model = build()

    def score(self, group: Group) -> list[Score]:
        """Score a group."""
        return self._model(*group)


class ModelActorPool(RewardModelPool):
    """Scores groups of completions by a reward model in Ray actors. Used as `RewardPool` is.

    Args:
        name: folder of the reward model, which every node sees.
        build: loads it in an actor; picklable.
        cluster: joins or starts the cluster.
        actors: how many.
        gpus: for each actor, of a cluster.
        timeout_s: seconds for each sample; a group has that times its size, then its actor is
            killed.
        field: of the config, where the reward stands, for messages.
    """

    def __init__(
        self,
        name: str,
        build: BuildModel,
        *,
        cluster: OpenCluster,
        actors: int,
        gpus: Callable[[Cluster], int],
        timeout_s: float,
        field: str,
    ) -> None:
        super().__init__(name, build, timeout_s=timeout_s, field=field)
        self._open = cluster
        self._size = actors
        self._gpus = gpus
        self._cluster: Cluster | None = None
        self._places: list[Place] = []
        # By the number of their place.
        self._actors: dict[int, Any] = {}

    def start(self, patience: Patience | None = None) -> None:
        """Start the actors and wait until each has loaded the model.

        Raises:
            RewardDefinitionError: it cannot be loaded.
            ConfigError: the cluster cannot be reached, or has no room.
        """
        with self._lock:
            self._started()

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """Score groups of completions; what the model cannot read, and a lost actor, never raise.

        Raises:
            RewardDefinitionError: the model cannot be loaded.
            Stopped: a signal asked to stop.
            DeadlineError: no score came for too long.
        """
        patience = patience or Patience()
        idle: SimpleQueue[int] = SimpleQueue()
        for actor in range(self._size):
            idle.put(actor)

        def score_group(group: Group) -> list[Score]:
            actor = idle.get()
            try:
                found = self._run(cluster, actor, group, patience)
            finally:
                idle.put(actor)
            patience.answered()
            return found

        with self._lock:
            cluster = self._started()
            try:
                return in_threads(score_group, groups, patience, most=self._size)
            except BaseException:
                self._end_actors()  # they are in the middle of something
                raise

    def close(self) -> None:
        """End the actors, and the cluster where it was started for them."""
        with self._lock:
            self._end_actors()
            if self._cluster is not None:
                self._cluster.close()
                self._cluster = None

    def _started(self) -> Cluster:
        """Return the cluster, once it and every actor have started."""
        cluster = self._cluster
        if cluster is None:
            cluster = self._open()
            self._cluster = cluster
            gpus = self._gpus(cluster)
            self._places = [Place(index, gpus) for index in range(self._size)]
            cluster.reserve([bundle(1, gpus)] * self._size)
        if not self._actors:
            try:
                for loading in [self._new(cluster, place) for place in self._places]:
                    self._wait_loaded(cluster, loading)
            except BaseException:
                self._end_actors()
                raise
        return cluster

    def _new(self, cluster: Cluster, place: Place) -> Any:
        """Start an actor; the reference to wait for until it has loaded the model."""
        actor = cluster.start(RewardModelActor, place)
        self._actors[place.bundle] = actor
        return actor.build.remote(os.getcwd(), self._build)

    def _wait_loaded(self, cluster: Cluster, loading: Any) -> None:
        what = f"a reward model actor, asked to load {self.name},"
        try:
            cluster.result_of(loading, what, LOAD)
        except (OxrlError, OSError) as error:
            problem = f"{self.field}.name={self.name}: {error}"
            raise RewardDefinitionError(problem) from error

    def _run(self, cluster: Cluster, actor: int, group: Group, patience: Patience) -> list[Score]:
        """Score a group; by a new actor, where the first one is lost over it."""
        outcome = self._outcome(cluster, actor, group, patience)
        if isinstance(outcome, str):
            outcome = self._outcome(cluster, actor, group, patience)
        if isinstance(outcome, str):
            problem = f"two actors were lost over it, the second of which {outcome}"
            return failed_group(self.name, group, "error", problem)
        return outcome

    def _outcome(
        self, cluster: Cluster, actor: int, group: Group, patience: Patience
    ) -> list[Score] | str:
        """Score a group; or say how the actor was lost, which is then replaced."""
        limit_s = self._timeout_s * len(group[1])
        end = monotonic() + limit_s
        reference = self._actors[actor].score.remote(group)
        while not cluster.wait([reference], timeout=min(patience.slice_s, limit_s))[0]:
            patience.look(f"the reward model {self.name}. Raise run.deadlines.rollout")
            if monotonic() > end:
                self._replace(cluster, actor)
                return self._late(group, limit_s)
        try:
            scores = cluster.result_of(reference, f"reward model actor {actor}", LOAD)
        except LostActorError as lost:
            self._replace(cluster, actor)
            return str(lost)
        except (OxrlError, RuntimeError, ValueError) as error:  # a full device, a broken text
            return self._failed(group, error)
        return named_failures(self.name, group, scores)

    def _replace(self, cluster: Cluster, actor: int) -> None:
        """Start a new actor in the place of one that is lost or late."""
        cluster.end(self._actors[actor])
        log.warning("reward model actor %d is lost or late and is replaced", actor)
        cluster.await_place(self._places[actor], LOAD)
        self._wait_loaded(cluster, self._new(cluster, self._places[actor]))

    def _end_actors(self) -> None:
        if self._cluster is not None:
            for actor in self._actors.values():
                self._cluster.end(actor)
        self._actors = {}
