"""RayTrainer: the training ranks as a group of actors that the driver calls like one TrainEngine.

Every rank gets the whole batch, reads its own share of the rows and returns the whole output; rank
0's is the answer.
A group lives and dies as one: after the loss of any rank it is of no use, and a run starts again
from its checkpoint.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from time import monotonic
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    NamedTuple,
    NoReturn,
    ParamSpec,
    TypeVar,
)

import torch
from torch.nn import Module

from oxrl.engines.delivery.proof import Forwards, Probe, two_forwards
from oxrl.engines.ray.cluster import (
    Cluster,
    Packed,
    Place,
    enter,
    node_address,
    pack,
    unpack,
)
from oxrl.engines.sample.workers import call_on
from oxrl.engines.train import BucketStream, Fingerprints, Part, Rounding
from oxrl.engines.train.joined_ranks import CUT_OFF, WAITED
from oxrl.engines.train.trainer import Trainer
from oxrl.engines.transport.base import Copy, LineError, copied
from oxrl.engines.transport.ends import Devices, Sender, Sent, name_of
from oxrl.engines.transport.line import SENDER, Meeting, Seat
from oxrl.errors import LostActorError, LostRankError
from oxrl.models.stored import NamedTensor
from oxrl.runs.device import free_cache
from oxrl.runs.files import size_of
from oxrl.runs.waiting import waiting_for
from oxrl.tables.watch import Deadline, Deadlines, Phase
from oxrl.types import LossFn, Metrics, Output, TokenBatch, TrainBatch, Want

if TYPE_CHECKING:
    from oxrl.data.image_store import ImageStore

P = ParamSpec("P")
R = TypeVar("R")

# How long the other ranks may take to end a call after one failed, or after their collectives ran
# out of time.
GRACE_S = 10.0

# What a rank builds once it has its place in its environment: the engines by name, inside their
# process group.
BuildRank = Callable[[], AbstractContextManager[Mapping[str, Trainer]]]


NewModel = Callable[[], Module]
NewImages = Callable[[], "ImageStore"]


class Brought(NamedTuple):
    """Images that rows show: how to make a store for them, and what is in it."""

    new: NewImages
    contents: Mapping[str, bytes]


class RankActor:
    """The process around one training rank."""

    def address(self) -> tuple[str, int]:
        """Return an address of this rank as rank 0, with a port that is free now."""
        host = node_address()
        with socket.create_server((host, 0)) as server:
            return host, server.getsockname()[1]

    def build(self, directory: str, place: Mapping[str, str], build: BuildRank) -> dict[str, int]:
        """Make the engines, where the driver's relative paths mean the same; name -> bytes of the
        weights.
        """
        enter(directory)
        os.environ.update(place)
        self._rank = int(place["RANK"])
        self._first = self._rank == 0
        self._stack = ExitStack()  # held, because the process group is left when it goes
        self._engines = self._stack.enter_context(build())
        first = next(iter(self._engines.values()))
        self._device = first.device
        self._ranks = first.ranks
        self._sender = Sender(self._rank, int(place["WORLD_SIZE"]))
        return {name: engine.nbytes for name, engine in self._engines.items()}

    def call(
        self, engine: str, function: Callable[..., Any], inputs: Sequence[Any], deadline: Deadline
    ) -> Any:
        """Call a function on this rank, with a deadline for the others; rank 0 has the value."""
        with self._ranks.within(deadline, function.__name__):
            found = call_on(self._engines[engine], function, inputs)
        return found if self._first else None

    def where(self) -> Devices:
        """Return the device that weights leave from."""
        return (name_of(self._device),)

    def join(self, meeting: Meeting) -> str:
        """Meet the samplers; why that failed, or nothing."""
        seat = Seat(self._rank, SENDER)
        try:
            self._sender.join(meeting, seat, address=node_address(), device=self._device)
        except LineError as error:
            return str(error)
        return ""

    def send(self, engine: str, copy: Copy, by_line: bool, deadline: Deadline) -> Sent:
        """Send this rank's share of a copy of the weights, or only keep it; on every rank."""
        with self._ranks.within(deadline, "weights to be gathered"):
            policy = self._engines[engine]
            if self._sender.sends_all:
                weights = policy.weights(copy.part)
            else:
                # What is new in a copy is made of whole weights as they are.
                dtype = None if copy.strength else copy.sent_as
                weights = policy.weights_in_turn(copy.part, dtype)
            return self._sender.send(weights, copy, by_line=by_line)

    def sent(self) -> dict[str, str]:
        """Fingerprint this rank's share of what was sent last."""
        return self._sender.fingerprints()

    def kept(self) -> list[tuple[int, Any]]:
        """Put what this rank sent last into the object store; return (index, reference) of each."""
        import ray  # pyright: ignore[reportMissingImports]  (an extra)

        kept = self._sender.kept.items()
        return [(index, ray.put(pack(bucket))) for index, bucket in kept]  # pyright: ignore

    def free_cache(self) -> None:
        """Give back memory of the GPU that PyTorch only keeps, before somebody else needs it."""
        free_cache(self._device)

    def make_model(self, new_model: NewModel) -> None:
        """Make a model for `score_copy` on rank 0, before anybody waits for it in a collective."""
        if self._first:
            self._model = new_model()

    def score_copy(
        self, engine: str, probe: Probe, copy: Copy, brought: Brought | None, deadline: Deadline
    ) -> Forwards | None:
        """Score the probe with a copy of the weights, on rank 0; all ranks gather the weights."""
        with self._ranks.within(deadline, "a copy of the weights to be scored"):
            weights = self._engines[engine].weights(copy.part)
            if not self._first:
                for _ in weights:
                    pass
                return None
            images = None
            if brought is not None:
                images = brought.new()
                images.hold_only(brought.contents, list(brought.contents))
            model = self._model
            del self._model
            return two_forwards(model, copied(weights, copy), probe, copy.dtype, images)

    def next_bucket(self, engine: str, part: Part, start: bool) -> Packed | None:
        """Return the next bucket of gathered weights, or the first; None at the end."""
        if start:
            self._stream = self._engines[engine].weights(part)
        bucket = next(self._stream, None)
        return pack(bucket) if self._first and bucket is not None else None


class RankGroup:
    """One actor per place, joined as the ranks of one process group. `build` runs in each of them.

    Raises:
        LostRankError: a rank died or did not answer in time; the whole group is ended first.
    """

    def __init__(
        self,
        cluster: Cluster,
        places: Sequence[Place],
        build: BuildRank,
        waits: Deadlines,
        *,
        nbytes: int = 0,
    ) -> None:
        """Build the ranks.

        Args:
            waits: how long their answers may take.
            nbytes: of the files that they read first, as far as that is known.
        """
        self._cluster = cluster
        self.waits = waits
        self._ranks = [cluster.start(RankActor, place) for place in places]
        load = waits.of("load", nbytes)
        host, port = self.finish([self._ranks[0].address.remote()], "start", load)[0]
        # Of the store where the ranks meet; others may meet there too.
        self.store = (host, port)
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
        # Bytes of the weights of each engine, by its name.
        self.sizes: Mapping[str, int] = self.finish(building, "build its engines", load)[0]

    def begin(self, method: str, *inputs: Any) -> list[Any]:
        """Have every rank work on a method of its actor; what `finish` waits for."""
        return [getattr(actor, method).remote(*inputs) for actor in self._ranks]

    def call(self, deadline: Deadline, engine: str, function: Callable[..., R], *inputs: Any) -> R:
        """Call a method of an engine, or a function of it, on every rank; inputs are positional."""
        shared = self._cluster.put(inputs)  # they enter the object store once
        begun = self.begin("call", engine, function, shared, deadline)
        return self.finish(begun, f"{function.__name__} of {engine}", deadline)[0]

    def free_cache(self) -> None:
        """Have every rank give back the memory of its GPU that it only keeps for later."""
        deadline = self.waits.of("step")
        self.finish(self.begin("free_cache"), "free its cache", deadline)

    def next_bucket(self, engine: str, part: Part, start: bool) -> Packed | None:
        """Rank 0's next bucket of weights; None at the end."""
        begun = self.begin("next_bucket", engine, part, start)
        deadline = self.waits.of("sync", self.sizes[engine])
        return self.finish(begun, f"gather {part} of {engine}", deadline)[0]

    def finish(self, begun: Sequence[Any], asked: str, deadline: Deadline) -> list[Any]:
        """Return every rank's answer, once all have answered.

        Args:
            begun: what `begin` returned.
            asked: what the ranks do, for errors and for what is said meanwhile.
            deadline: of the work; collectives inside the ranks have the same.
        """
        with waiting_for(f"the training ranks, asked to {asked}", deadline):
            return self._answers(begun, asked, deadline)

    def _answers(self, references: Sequence[Any], asked: str, deadline: Deadline) -> list[Any]:
        # Collectives inside the ranks end first, with a better message.
        end = monotonic() + deadline.seconds + GRACE_S
        pending = list(references)
        found: dict[int, Any] = {}
        failures: list[Exception] = []
        while pending and monotonic() < end:
            done, pending = self._cluster.wait(pending, timeout=end - monotonic())
            for reference in done:
                rank = references.index(reference)
                what = f"training rank {rank} of {len(self._ranks)}"
                try:
                    found[rank] = self._cluster.result_of(reference, what, deadline)
                except Exception as error:  # noqa: BLE001  (raised below, once every rank has had its say)
                    failures.append(error)
                    end = min(end, monotonic() + GRACE_S)
        if failures or pending:
            silent = [references.index(reference) for reference in pending]
            self._fail(failures, silent, asked, deadline)
        return [found[rank] for rank in range(len(references))]

    def _fail(
        self, failures: list[Exception], silent: list[int], asked: str, deadline: Deadline
    ) -> NoReturn:
        """Raise what went wrong; end the group unless every rank has answered it."""
        # The first failure is the reason, unless it only says that somebody else is gone.
        reason = next((error for error in failures if not _is_echo(error)), None)
        own = reason if not isinstance(reason, LostActorError) else None
        if silent or own is None:
            self.close()
        if own is not None:
            raise own
        late = f"training ranks {silent} stopped answering; the longest wait for this is {deadline}"
        stopped = late if silent else failures[0]
        raise LostRankError(
            f"{reason or stopped} (asked to {asked}); "
            f"the group of {len(self._ranks)} ranks is ended"
        ) from reason

    def close(self) -> None:
        """End every rank."""
        for actor in self._ranks:
            self._cluster.end(actor)


def _is_echo(error: Exception) -> bool:
    """True if a rank's failure only says that another rank is gone."""
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
        return self._call("step", Trainer.forward, inputs, want)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Output:
        return self._call("step", Trainer.forward_backward, batch, loss_fn, want)

    def optim_step(self) -> Metrics:
        return self._call("step", Trainer.optim_step)

    def skip_step(self) -> Metrics:
        return self._call("step", Trainer.skip_step)

    def set_weights(self, named: Iterable[NamedTensor]) -> None:
        self._call("sync", Trainer.set_weights, list(named))

    def weights(self, part: Part = "all") -> BucketStream:
        packed = self._group.next_bucket(self._name, part, start=True)
        while packed is not None:
            yield unpack(packed)
            packed = self._group.next_bucket(self._name, part, start=False)

    def fingerprints(
        self, dtype: torch.dtype | None, part: Part = "all", rounded: Rounding | None = None
    ) -> Fingerprints:
        return self._call("sync", Trainer.fingerprints, dtype, part, rounded)

    def forward_without_adapter(self, inputs: TokenBatch, want: Want) -> Output:
        """Read a batch with the model under the adapter: the reference."""
        return self._call("step", Trainer.forward_without_adapter, inputs, want)

    def save(self, directory: Path) -> None:
        self._call("checkpoint", Trainer.save, directory.resolve())

    def begin_save(self, directory: Path, copied: bool) -> bool:
        return self._call("checkpoint", Trainer.begin_save, directory.resolve(), copied)

    def save_progress(self) -> tuple[int, bool]:
        return self._call("checkpoint", Trainer.save_progress)

    def end_save(self) -> None:
        self._call("checkpoint", Trainer.end_save)

    def drop_save(self) -> None:
        """Nothing to do: a rank's threads end with it."""

    def part_problems(self, directory: Path) -> list[str]:
        return self._read(Trainer.part_problems, directory)

    def load(self, directory: Path) -> None:
        self._read(Trainer.load, directory)

    def _call(
        self,
        phase: Phase,
        function: Callable[Concatenate[Trainer, P], R],
        *inputs: P.args,
        **_: P.kwargs,
    ) -> R:
        deadline = self._group.waits.of(phase, self._group.sizes[self._name])
        return self._group.call(deadline, self._name, function, *inputs)

    def _read(self, function: Callable[[Trainer, Path], R], directory: Path) -> R:
        """Call what reads a directory."""
        deadline = self._group.waits.of("load", size_of(directory))
        return self._group.call(deadline, self._name, function, directory.resolve())
