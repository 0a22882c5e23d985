"""A Ray cluster with room reserved for every actor of a run, and calls to actors that end.

Without an address oxRL starts a cluster of its own on this machine: no dashboard, every port on the
loopback device.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from oxrl.engines.ray.head import (
    HeadWatch,
    LastWords,
    listens,
    patience_with_head,
    refuse_silence,
)
from oxrl.engines.train import Bucket, Buckets
from oxrl.errors import ConfigError, EngineError, LostActorError, MissingExtraError
from oxrl.tables.watch import Deadline
from oxrl.usercode.keeper import leave_with_parent

if TYPE_CHECKING:
    import numpy

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[2]
RESERVE_S = 10.0
# Between two looks at whether a lost node has been noticed, or an actor has answered, in seconds.
LOOK_S = 0.5
MISSING_MODULE = re.compile(r"No module named '([^']+)'")
# Of the lines in which Ray tells of a death, the most telling first.
TELLING = (
    "low on memory",
    "out of memory",
    "killed due to",
    "oom",
    "node has died",
    "dead because",
    "exit",
)
# Names of Ray's errors of an object store without room, in shared memory and on the disk behind it.
STORE_ERRORS = ("ObjectStoreFullError", "OutOfDiskError")
NO_STORE = (
    "Ray's object store, through which weights and batches travel, is full: {}. It is shared "
    "memory, and a disk behind it: give the node a larger /dev/shm, start Ray with "
    "--object-store-memory, or free that disk"
)
OF_MEMORY = (
    " (to need less: fewer actors on a node, a smaller train.micro_batch_tokens or "
    "inference_engine.max_rows; `oxrl plan` estimates it)"
)
# What a bundle or a node has: how many of "CPU" and "GPU".
Bundle = dict[str, float]
# (name, dtype, shape, bytes): numpy arrays travel through Ray's object store without a copy per
# reader.
Packed = list[tuple[str, torch.dtype, torch.Size, "numpy.ndarray[Any, Any]"]]


class Passed:
    """Bytes of weights that this process has handed to the object store, or taken."""

    bytes = 0


class Place(NamedTuple):
    """The place of an actor: a bundle of the placement group, and its share of the bundle's GPUs.

    Every actor takes one CPU.
    """

    bundle: int
    gpus: float


class Layout(NamedTuple):
    """The bundles to reserve, and where in them training ranks and rollout actors live."""

    bundles: list[Bundle]
    trainers: list[Place]
    samplers: list[Place]


def layout(
    trainers: int, samplers: int, *, trainer_gpus: int, sampler_gpus: int, colocated: bool
) -> Layout:
    """Give each training rank and each rollout actor its place.

    Colocated, rank i and rollout actor i share a bundle and half its GPU each; separate, everybody
    has a bundle.

    Args:
        trainers: number of training ranks.
        samplers: number of rollout actors.
        trainer_gpus: of a training rank.
        sampler_gpus: of a rollout actor.
    """
    if colocated:
        count = max(trainers, samplers)
        shared = [Place(i, trainer_gpus / 2) for i in range(count)]
        bundles = [bundle(2, trainer_gpus) for _ in shared]
        return Layout(bundles, shared[:trainers], shared[:samplers])
    gpus = [trainer_gpus] * trainers + [sampler_gpus] * samplers
    places = [Place(i, own) for i, own in enumerate(gpus)]
    bundles = [bundle(1, own) for own in gpus]
    return Layout(bundles, places[:trainers], places[trainers:])


def by_node(planned: Layout, nodes: Mapping[int, str]) -> Layout:
    """Number the same places node by node: neighbours among ranks are neighbours on a machine.

    Args:
        nodes: where each bundle is.
    """
    order = list(dict.fromkeys(nodes[index] for index in sorted(nodes)))

    def at(place: Place) -> int:
        return order.index(nodes[place.bundle])

    trainers = sorted(planned.trainers, key=at)
    samplers = sorted(planned.samplers, key=at)
    return Layout(planned.bundles, trainers, samplers)


def bundle(cpus: float, gpus: float) -> Bundle:
    """Describe a bundle with room for so many CPUs and GPUs."""
    return {"CPU": cpus} | ({"GPU": gpus} if gpus else {})


class Cluster:
    """A Ray cluster, joined at `address` or started for this process.

    A process that is connected to a cluster already keeps it, and keeps it afterwards.

    Args:
        actors: that a cluster started here has room for.
        address: of a cluster to join, host:port or auto.
        ship: send this package to the nodes, which then need not have it.

    Raises:
        ConfigError: the cluster cannot be reached.
        MissingExtraError: Ray is not installed.
    """

    def __init__(self, actors: int, *, address: str | None = None, ship: bool = False) -> None:
        gone_s = patience_with_head()
        self.ray = _import_ray(loopback=address is None)
        self._started = not self.ray.is_initialized()
        self._group: Any = None
        self._last_words: LastWords | None = None
        if self._started:
            self._connect(address, actors, ship)
            self._last_words = LastWords()
        self._head = HeadWatch(self.ray.get_runtime_context().gcs_address, gone_s)

    def __getstate__(self) -> dict[str, Any]:
        # A loss that knows a reference on Ray actors takes this object along to the ranks, where
        # nothing is asked of it. Threads stay here.
        return {**vars(self), "_head": None, "_last_words": None}

    def _connect(self, address: str | None, actors: int, ship: bool) -> None:
        options: dict[str, Any] = {}
        if address is None:
            # Whatever else runs on this machine, or RAY_ADDRESS names, is somebody else's.
            options["address"] = "local"
            # CPUs are names for places here, not a share of a core: a small machine may run more
            # actors than it has cores.
            options["num_cpus"] = max(actors, os.cpu_count() or 1)
            options["include_dashboard"] = False
        else:
            options["address"] = address
            refuse_silence(address)
        if ship:
            options["runtime_env"] = {"py_modules": [str(PACKAGE)]}
        where = f"at run.ray_address {address!r}" if address else "could be started here"
        try:
            with _own_signals():
                self.ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"no Ray cluster {where}: {reason}") from error

    def gpus(self) -> int:
        """Count the GPUs of its nodes, whatever the machine of this process has."""
        return int(_totals(self._nodes())["GPU"])

    def reserve(self, bundles: Sequence[Bundle]) -> Mapping[int, str]:
        """Take room for the actors of a run.

        Returns:
            The node of each bundle.

        Raises:
            ConfigError: the cluster does not have it within 10 seconds.
        """
        end = monotonic() + RESERVE_S
        while monotonic() < end:
            self._group = self.ray.util.placement_group(list(bundles), strategy="PACK")
            ready = self.wait([self._group.ready()], timeout=end - monotonic())[0]
            if ready and self._lost_places() == []:
                return self._table()["bundles_to_node_id"]
            # On a node that is gone, which Ray has not noticed: ask again.
            self.ray.util.remove_placement_group(self._group)
            self._group = None
            sleep(LOOK_S)
        raise ConfigError(self._no_room(bundles))

    def _no_room(self, bundles: Sequence[Bundle]) -> str:
        free = _totals([self.ray.available_resources()])
        nodes = self._nodes()
        largest = max(bundles, key=lambda bundle: (bundle.get("GPU", 0), bundle["CPU"]))
        return (
            f"the Ray cluster has no room for this run ({RESERVE_S:g} s). "
            f"Asked: {_words(_totals(bundles))}, as {len(bundles)} bundles, the largest "
            f"{_words(largest)}. Available: {_words(free)} of {_words(_totals(nodes))} on "
            f"{len(nodes)} nodes. Lower run.training_gpus or inference_engine.actors, or wait for "
            "what else runs there"
        )

    def _table(self) -> Mapping[str, Any]:
        """Return Ray's record of the room that was taken."""
        return self.ray.util.placement_group_table(self._group)

    def _lost_places(self) -> list[int]:
        """List the bundles that are nowhere, or on a node where nobody answers."""
        answering = {
            node["NodeID"]
            for node in self.ray.nodes()
            if node["Alive"] and listens(node["NodeManagerAddress"], node["NodeManagerPort"])
        }
        table = self._table()
        homes: Mapping[int, str] = table["bundles_to_node_id"]
        lost = [index for index in table["bundles"] if homes.get(index) not in answering]
        return sorted(lost)

    def await_place(self, place: Place, deadline: Deadline) -> None:
        """Wait until there is room for an actor again, where its node was lost: Ray looks for it.

        Raises:
            EngineError: no node had any in time.
        """
        end = monotonic() + deadline.seconds
        while place.bundle in self._lost_places():
            self.check_head()
            if monotonic() > end:
                asked = _words(self._table()["bundles"][place.bundle])
                nodes = self._nodes()
                raise EngineError(
                    f"a node of the Ray cluster was lost, and within {deadline} no other had room "
                    f"for the actor that was on it: {asked} asked, {len(nodes)} nodes left with "
                    f"{_words(_totals(nodes))} in all. Start a node in its place, then the same "
                    "command with --resume"
                )
            sleep(LOOK_S)

    def _nodes(self) -> list[Mapping[str, float]]:
        """Return the resources of every node that is alive."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def put(self, thing: object) -> Any:
        """Put a thing into the object store; every actor can read the reference that is returned.

        Raises:
            EngineError: the object store has no room for it.
        """
        errors = self.ray.exceptions
        try:
            return self.ray.put(thing)
        except (errors.ObjectStoreFullError, errors.OutOfDiskError) as error:
            raise EngineError(NO_STORE.format(_reason(error))) from error

    def wait(
        self, references: Sequence[Any], *, timeout: float, count: int = 1
    ) -> tuple[list[Any], list[Any]]:
        """Those of calls that are over, once so many are or the time is up; and the others.

        Args:
            timeout: in seconds.

        Raises:
            LostClusterError: the head of the cluster is gone.
        """
        end = monotonic() + timeout
        while True:
            self.check_head()
            left = max(0.0, min(LOOK_S, end - monotonic()))
            done, others = self.ray.wait(list(references), num_returns=count, timeout=left)
            if len(done) >= count or monotonic() >= end:
                return done, others

    def end(self, actor: Any) -> None:
        """End an actor, whatever it is doing."""
        self.ray.kill(actor)
        if not self._head.answers():
            # It is the head that kills; without one, the actor has to go by itself.
            self.ray.wait([actor.__ray_call__.remote(_leave)], timeout=LOOK_S)

    def check_head(self) -> None:
        """Return where the head of the cluster was seen not too long ago.

        Raises:
            LostClusterError: it is gone.
        """
        self._head.check()

    def start(self, actor: type, place: Place) -> Any:
        """Start a new actor at `place`; return its handle.

        Ray never restarts it: whoever started it decides what follows.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=place.bundle
        )
        placed = self.ray.remote(actor).options(
            num_cpus=1, num_gpus=place.gpus, max_restarts=0, scheduling_strategy=strategy
        )
        return placed.remote()

    def result_of(self, reference: Any, what: str, deadline: Deadline) -> Any:
        """Return an actor's result; an exception of its code is raised here as it was there.

        Args:
            what: the actor and what it was asked, for the error.

        Raises:
            LostActorError: the actor died or did not answer in time.
            LostClusterError: the head of the cluster is gone.
        """
        ray = self.ray
        self.wait([reference], timeout=deadline.seconds)
        try:
            return ray.get(reference, timeout=0)
        except ray.exceptions.GetTimeoutError as error:
            raise LostActorError(f"{what} did not answer within {deadline}") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayError):
                raise _lost(what, error.cause) from error
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise _lost(what, error) from error

    def put_buckets(self, buckets: Buckets) -> list[Any]:
        """Put weights into the object store; return references to them."""
        return [self.put(pack(bucket)) for bucket in buckets]

    def close(self) -> None:
        """Give the room back, which ends every actor in it; end a cluster that was started here."""
        if self._group is not None and self._head.answers():
            self.ray.util.remove_placement_group(self._group)
        self._head.close()
        if self._started:
            self.ray.shutdown()
        if self._last_words is not None:
            self._last_words.close()


def _leave(_: object) -> None:
    """In an actor: end its process."""
    os._exit(0)


def _lost(what: str, error: Exception) -> EngineError:
    """Turn Ray's own error into ours: died, killed for memory, node lost, a missing module."""
    module = MISSING_MODULE.search(str(error))
    if type(error).__name__ in STORE_ERRORS:
        return EngineError(f"{what} failed. {NO_STORE.format(_reason(error))}")
    if module is None:
        reason = _reason(error)
        hint = OF_MEMORY if "memory" in reason.lower() else ""
        return LostActorError(f"{what} died: {reason}{hint}")
    return EngineError(
        f"{what} could not start: its node has no module {module[1]!r}. Install the same packages "
        "on every node, or send oxRL itself with run.ray_working_dir: ship"
    )


def _reason(error: Exception) -> str:
    """Find the line of Ray's account of a death that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for words in TELLING:
        for line in lines:
            if words in line.lower():
                return line[:300]
    return lines[0][:300] if lines else type(error).__name__


def enter(directory: str) -> None:
    """Have an actor work where the driver does, so that relative paths mean the same, and stay no
    longer than its node.

    Raises:
        ConfigError: its node has no such directory.
    """
    # The raylet: Ray sees to that as a rule; an actor that waits in a collective, for one, was seen
    # to stay.
    leave_with_parent()
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            f"node {socket.gethostname()} cannot work in {directory}, where this run was started: "
            f"{error.strerror}. Start it from a directory that every node shares"
        ) from error


def node_address() -> str:
    """In an actor: the address of its node, as the others reach it."""
    import ray  # pyright: ignore[reportMissingImports]  (an extra)

    return ray.util.get_node_ip_address()  # pyright: ignore[reportAttributeAccessIssue]


def pack(bucket: Bucket) -> Packed:
    """Pack a bucket as the object store likes it."""
    packed: Packed = []
    for name, tensor in bucket:
        flat = tensor.detach().cpu().contiguous().view(-1)
        Passed.bytes += flat.nbytes
        packed.append((name, tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy()))
    return packed


def unpack(packed: Packed) -> Bucket:
    """Unpack a bucket again.

    On CPU its tensors are the object store's memory, which must not be written to.
    """
    bucket: Bucket = []
    with warnings.catch_warnings():
        # PyTorch has no read-only tensors, and says so.
        warnings.simplefilter("ignore", UserWarning)
        for name, dtype, shape, data in packed:
            Passed.bytes += data.nbytes
            bucket.append((name, torch.from_numpy(data).view(dtype).view(shape)))
    return bucket


def _import_ray(*, loopback: bool) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if loopback:
        # Ray's own switch for "this cluster is one machine": servers listen on 127.0.0.1 alone.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # Ray gives way to everything else on the machine (15); here the actors are what the machine
        # is for.
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray  # pyright: ignore[reportMissingImports]  (an extra)
    except ImportError as error:
        raise MissingExtraError(
            "training actors (train.backend in reinforcement learning) and inference_engine.actors "
            "need Ray, which is not installed: pip install -e '.[ray]'"
        ) from error
    return ray


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the signal handlers of this process inside the block.

    Ray takes over SIGTERM when it connects; a run that saves and stops on it needs its own back.
    """
    main = threading.current_thread() is threading.main_thread()
    held = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    if main:
        for number, handler in held.items():
            signal.signal(number, handler)


def _totals(resources: Sequence[Mapping[str, float]]) -> Bundle:
    return {kind: sum(part.get(kind, 0.0) for part in resources) for kind in ("CPU", "GPU")}


def _words(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0.0):g} {kind}" for kind in ("CPU", "GPU"))
