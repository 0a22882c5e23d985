"""RayTrainer: the training ranks as a group of actors that the driver calls like one TrainEngine.

Every rank gets the whole batch, reads its own share of the rows and returns the whole output; rank
0's is the answer.
A group lives and dies as one: after the loss of any rank it is of no use, and a run starts again
from its checkpoint.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from oxrl.engines.ray.cluster import (
    LOAD_S,
    Cluster,
    LostActorError,
    Packed,
    Place,
    call_on,
    enter,
    pack,
    result_of,
    unpack,
)
from oxrl.engines.train.base import Bucket, Want
from oxrl.engines.train.ranks import CUT_OFF, WAITED
from oxrl.engines.train.trainer import Trainer
from oxrl.errors import LostRankError
from oxrl.models.weights import buckets
from oxrl.types import LossFn, Metrics, Output, TokenBatch, TrainBatch

P = ParamSpec("P")
R = TypeVar("R")

# Bytes per second of a disk that is slow and not dead, for all ranks together.
SLOWEST_DISK = 20e6
# How long the other ranks may take to end a call after one failed, or after their collectives ran
# out of time.
GRACE_S = 10.0

# What a rank builds once it has its place in its environment: the engines by name, inside their
# process group.
BuildRank = Callable[[], AbstractContextManager[Mapping[str, Trainer]]]


Stream = Literal["weights", "gradients"]


class RankActor:
    """The process around one training rank."""

    def address(self) -> tuple[str, int]:
        """Where this rank can be reached as rank 0, at a port that is free now."""
        import ray  # pyright: ignore[reportMissingImports]  (an extra)

        host = ray.util.get_node_ip_address()  # pyright: ignore[reportAttributeAccessIssue]
        with socket.create_server((host, 0)) as server:
            return host, server.getsockname()[1]

    def build(self, directory: str, place: Mapping[str, str], build: BuildRank) -> list[str]:
        """Make the engines, where the driver's relative paths mean the same; their names."""
        enter(directory)
        os.environ.update(place)
        self._first = place["RANK"] == "0"
        self._stack = ExitStack()  # held, because the process group is left when it goes
        self._engines = self._stack.enter_context(build())
        return list(self._engines)

    def call(self, engine: str, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Every rank calls; rank 0 returns what it got."""
        found = call_on(self._engines[engine], function, inputs)
        return found if self._first else None

    def next_bucket(self, name: str, stream: Stream, start: bool) -> Packed | None:
        """The next bucket of what all ranks gather together, or the first; None at the end."""
        if start:
            engine = self._engines[name]
            self._stream = engine.weights() if stream == "weights" else buckets(engine.gradients())
        bucket = next(self._stream, None)
        return pack(bucket) if self._first and bucket is not None else None


class RankGroup:
    """One actor per place, joined as the ranks of one process group. `build` runs in each of them.

    Raises:
        LostRankError: a rank died or did not answer within `deadline_s`; the whole group is ended
            first.
    """

    def __init__(
        self, cluster: Cluster, places: Sequence[Place], build: BuildRank, *, deadline_s: float
    ) -> None:
        self._cluster = cluster
        self._deadline_s = deadline_s
        self._ranks = [cluster.start(RankActor, place) for place in places]
        host, port = self._wait([self._ranks[0].address.remote()], "start", LOAD_S)
        shared = {
            "WORLD_SIZE": str(len(places)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "LOCAL_RANK": "0",  # Ray shows every actor its own device as the first
        }
        building: list[Any] = []
        for rank, actor in enumerate(self._ranks):
            place = {"RANK": str(rank), **shared}
            building.append(actor.build.remote(os.getcwd(), place, build))
        self.names: list[str] = self._wait(building, "build its engines", max(LOAD_S, deadline_s))

    def call(
        self,
        engine: str,
        function: Callable[Concatenate[Trainer, P], R],
        *inputs: P.args,
        **_: P.kwargs,
    ) -> R:
        """Call a method of an engine, or a function of it, on every rank; inputs are positional."""
        return self._call(engine, function, inputs, self._deadline_s)

    def read(self, engine: str, function: Callable[[Trainer, Path], R], directory: Path) -> R:
        """Call what reads a directory, with the time that a slow disk takes for its bytes."""
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        deadline_s = self._deadline_s + size / SLOWEST_DISK
        return self._call(engine, function, (directory.resolve(),), deadline_s)

    def _call(
        self, engine: str, function: Callable[..., R], inputs: Sequence[Any], deadline_s: float
    ) -> R:
        shared = self._cluster.put(inputs)  # they enter the object store once
        calls = [actor.call.remote(engine, function, shared) for actor in self._ranks]
        return self._wait(calls, f"{function.__name__} of {engine}", deadline_s)

    def next_bucket(self, engine: str, stream: Stream, start: bool) -> Packed | None:
        """Rank 0's next bucket; None at the end of the stream."""
        calls = [actor.next_bucket.remote(engine, stream, start) for actor in self._ranks]
        return self._wait(calls, f"gather {stream} of {engine}")

    def _wait(self, references: Sequence[Any], asked: str, deadline_s: float | None = None) -> Any:
        """Rank 0's answer once every rank has answered."""
        # Collectives inside the ranks end after deadline_s, with a better message.
        end = time.monotonic() + (deadline_s or self._deadline_s) + GRACE_S
        pending = list(references)
        found: dict[int, Any] = {}
        failures: list[Exception] = []
        while pending and time.monotonic() < end:
            done, pending = self._cluster.ray.wait(pending, timeout=end - time.monotonic())
            for reference in done:
                rank = references.index(reference)
                what = f"training rank {rank} of {len(self._ranks)}"
                try:
                    found[rank] = result_of(self._cluster.ray, reference, what, deadline_s=GRACE_S)
                except Exception as error:  # noqa: BLE001  (raised below, once every rank has had its say)
                    failures.append(error)
                    end = min(end, time.monotonic() + GRACE_S)
        if failures or pending:
            silent = [references.index(reference) for reference in pending]
            self._fail(failures, silent, asked)
        return found[0]

    def _fail(self, failures: list[Exception], silent: list[int], asked: str) -> NoReturn:
        """Raise what went wrong; end the group unless every rank has answered it."""
        # The first failure is the reason, unless it only says that somebody else is gone.
        reason = next((error for error in failures if not _is_echo(error)), None)
        own = reason if not isinstance(reason, LostActorError) else None
        if silent or own is None:
            self.close()
        if own is not None:
            raise own
        stopped = f"training ranks {silent} stopped answering" if silent else failures[0]
        raise LostRankError(
            f"{reason or stopped} (asked to {asked}); "
            f"the group of {len(self._ranks)} ranks is ended"
        ) from reason

    def close(self) -> None:
        """End every rank."""
        for actor in self._ranks:
            self._cluster.ray.kill(actor)


def _is_echo(error: Exception) -> bool:
    """Whether a rank's failure only says that another rank is gone."""
    echoes = any(said in str(error) for said in (*WAITED, *CUT_OFF))
    return echoes and not isinstance(error, LostActorError)


class RayTrainer:
    """See TrainEngine: engine `name` of a group. `save` and `load` need a file system that every
    rank sees.
    """

    def __init__(self, group: RankGroup, name: str) -> None:
        self._group = group
        self._name = name

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        return self._group.call(self._name, Trainer.forward, inputs, want)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Output:
        return self._group.call(self._name, Trainer.forward_backward, batch, loss_fn, want)

    def optim_step(self) -> Metrics:
        return self._group.call(self._name, Trainer.optim_step)

    def skip_step(self) -> Metrics:
        return self._group.call(self._name, Trainer.skip_step)

    def set_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._group.call(self._name, Trainer.set_weights, list(named))

    def weights(self) -> Iterator[Bucket]:
        return self._stream("weights")

    def fingerprints(self, dtype: torch.dtype) -> Mapping[str, str]:
        return self._group.call(self._name, Trainer.fingerprints, dtype)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return (named for bucket in self._stream("gradients") for named in bucket)

    def _stream(self, stream: Stream) -> Iterator[Bucket]:
        packed = self._group.next_bucket(self._name, stream, start=True)
        while packed is not None:
            yield unpack(packed)
            packed = self._group.next_bucket(self._name, stream, start=False)

    def save(self, directory: Path) -> None:
        self._group.call(self._name, Trainer.save, directory.resolve())

    def begin_save(self, directory: Path, copied: bool) -> bool:
        return self._group.call(self._name, Trainer.begin_save, directory.resolve(), copied)

    def save_progress(self) -> tuple[int, bool]:
        return self._group.call(self._name, Trainer.save_progress)

    def end_save(self) -> None:
        self._group.call(self._name, Trainer.end_save)

    def drop_save(self) -> None:
        """Nothing to do: a rank's threads end with it."""

    def part_problems(self, directory: Path) -> list[str]:
        return self._group.read(self._name, Trainer.part_problems, directory)

    def load(self, directory: Path) -> None:
        self._group.read(self._name, Trainer.load, directory)
