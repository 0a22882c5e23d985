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
from typing import Any

from torch import Tensor

from oxrl.engines.ray.cluster import LOAD_S, Cluster, Lost, Packed, Place, answer, pack, unpack
from oxrl.engines.train.base import Bucket, Want
from oxrl.engines.train.ranks import CUT_OFF, WAITED
from oxrl.engines.train.trainer import Trainer
from oxrl.errors import LostRankError
from oxrl.models.weights import buckets
from oxrl.types import LossFn, Metrics, Output, TokenBatch, TrainBatch

# How long the other ranks may take to end a call after one failed, or after their collectives ran
# out of time.
GRACE_S = 10.0

# What a rank builds once it has its place in its environment: the engines by name, inside their
# process group.
BuildRank = Callable[[], AbstractContextManager[Mapping[str, Trainer]]]


class RankActor:
    """The process around one training rank."""

    def address(self) -> tuple[str, int]:
        """Where this rank can be reached as rank 0, at a port that is free now."""
        import ray  # pyright: ignore[reportMissingImports]  (an extra)

        host = ray.util.get_node_ip_address()  # pyright: ignore[reportAttributeAccessIssue]
        with socket.create_server((host, 0)) as server:
            return host, server.getsockname()[1]

    def build(self, directory: str, place: Mapping[str, str], build: BuildRank) -> list[str]:
        """Make the engines, where the driver's relative paths mean the same; returns their
        names.
        """
        os.chdir(directory)
        os.environ.update(place)
        self._first = place["RANK"] == "0"
        self._stack = ExitStack()  # held, because the process group is left when it goes
        self._engines = self._stack.enter_context(build())
        return list(self._engines)

    def call(self, asked: tuple[str, str | Callable[..., Any], Sequence[Any]]) -> Any:
        """(engine, a method or a function of it, arguments), on every rank; rank 0 returns what it
        returned.
        """
        name, what, arguments = asked
        engine = self._engines[name]
        found = (
            getattr(engine, what)(*arguments) if isinstance(what, str) else what(engine, *arguments)
        )
        return found if self._first else None

    def next_bucket(self, asked: tuple[str, str, bool]) -> Packed | None:
        """The next bucket of a stream that all ranks gather together; None at its end."""
        name, stream, start = asked
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
        self._cluster, self._deadline_s = cluster, deadline_s
        self._ranks = [cluster.start(RankActor, place) for place in places]
        host, port = self._wait([self._ranks[0].address.remote()], "start", LOAD_S)
        shared = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        shared["LOCAL_RANK"] = "0"  # Ray shows every actor its own device as the first
        ranks = [{"RANK": str(rank)} | shared for rank in range(len(places))]
        building = [
            a.build.remote(os.getcwd(), rank, build)
            for a, rank in zip(self._ranks, ranks, strict=True)
        ]
        self.names: list[str] = self._wait(building, "build its engines", max(LOAD_S, deadline_s))

    def call(self, method: str, asked: tuple[Any, ...]) -> Any:
        """Call a method of RankActor on every rank; the arguments enter the object store once."""
        reference = self._cluster.ray.put(asked)
        return self._wait(
            [getattr(actor, method).remote(reference) for actor in self._ranks],
            f"{method} {asked[:2]}",
        )

    def _wait(self, references: Sequence[Any], asked: str, deadline_s: float | None = None) -> Any:
        """Rank 0's answer once every rank has answered."""
        ray, rank_of = (
            self._cluster.ray,
            {reference: rank for rank, reference in enumerate(references)},
        )
        # Collectives inside the ranks end after deadline_s, with a better message.
        end, pending = (
            time.monotonic() + (deadline_s or self._deadline_s) + GRACE_S,
            list(references),
        )
        first: Any = None
        failures: list[Exception] = []
        while pending and (left := end - time.monotonic()) > 0:
            done, pending = ray.wait(pending, timeout=left)
            for reference in done:
                rank = rank_of[reference]
                try:
                    found = answer(
                        ray,
                        reference,
                        f"training rank {rank} of {len(self._ranks)}",
                        deadline_s=GRACE_S,
                    )
                    first = found if rank == 0 else first
                except Exception as error:  # noqa: BLE001  (raised below, once every rank has had its say)
                    failures.append(error)
                    end = min(end, time.monotonic() + GRACE_S)
        if not failures and not pending:
            return first
        silent = [rank_of[reference] for reference in pending]
        # The first failure is the reason, unless it only says that somebody else is gone.
        echoes = (*WAITED, *CUT_OFF)
        reason = next(
            (
                e
                for e in failures
                if isinstance(e, Lost) or not any(said in str(e) for said in echoes)
            ),
            None,
        )
        if reason is not None and not isinstance(reason, Lost):
            if silent:
                self.close()
            raise reason
        self.close()
        what = reason or (f"training ranks {silent} stopped answering" if silent else failures[0])
        raise LostRankError(
            f"{what} (asked to {asked}); the group of {len(self._ranks)} ranks is ended"
        ) from reason

    def close(self) -> None:
        """End every rank."""
        for actor in self._ranks:
            self._cluster.ray.kill(actor)


class RayTrainer:
    """See TrainEngine: engine `name` of a group. `save` and `load` need a file system that every
    rank sees.
    """

    def __init__(self, group: RankGroup, name: str) -> None:
        self._group, self._name = group, name

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._group.call("call", (self._name, method, arguments))

    def _stream(self, what: str) -> Iterator[Bucket]:
        start = True
        while (packed := self._group.call("next_bucket", (self._name, what, start))) is not None:
            yield unpack(packed)
            start = False

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        return self._call("forward", inputs, want)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Output:
        return self._call("forward_backward", batch, loss_fn, want)

    def optim_step(self) -> Metrics:
        return self._call("optim_step")

    def skip_step(self) -> Metrics:
        return self._call("skip_step")

    def set_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._call("set_weights", list(named))

    def weights(self) -> Iterator[Bucket]:
        return self._stream("weights")

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return (named for bucket in self._stream("gradients") for named in bucket)

    def save(self, directory: Path) -> None:
        self._call("save", directory.resolve())

    def load(self, directory: Path) -> None:
        self._call("load", directory.resolve())
