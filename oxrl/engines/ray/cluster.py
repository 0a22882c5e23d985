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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from oxrl.engines.train.base import Bucket
from oxrl.errors import ConfigError, EngineError, MissingExtraError
from oxrl.runs.deadlines import Deadline

if TYPE_CHECKING:
    import numpy

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[2]
RESERVE_S = 10.0
CONNECT_S = 5.0
ADDRESS = re.compile(r"(?:ray://)?\[?(?P<host>[^/]+?)\]?:(?P<port>\d+)")
SETTINGS = b"\x04"  # the kind of an HTTP/2 frame
MISSING_MODULE = re.compile(r"No module named '([^']+)'")
# Of the lines in which Ray tells of a death, the most telling first.
TELLING = ("out of memory", "killed due to", "oom", "dead because", "exit")
# What a bundle or a node has: how many of "CPU" and "GPU".
Bundle = dict[str, float]
# (name, dtype, shape, bytes): numpy arrays travel through Ray's object store without a copy per
# reader.
Packed = list[tuple[str, torch.dtype, torch.Size, "numpy.ndarray[Any, Any]"]]


class Passed:
    """Bytes of weights and gradients that this process has handed to the object store, or taken."""

    bytes = 0


class Place(NamedTuple):
    """Where an actor lives: a bundle of the placement group, and how many of its GPUs it takes.

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


def bundle(cpus: float, gpus: float) -> Bundle:
    """What has room for so many CPUs and GPUs."""
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
        self.ray = _import_ray(loopback=address is None)
        self._started = not self.ray.is_initialized()
        if self._started:
            self._connect(address, actors, ship)

    def _connect(self, address: str | None, actors: int, ship: bool) -> None:
        options: dict[str, Any] = {}
        if address is None:
            # CPUs are names for places here, not a share of a core: a small machine may run more
            # actors than it has cores.
            options["num_cpus"] = max(actors, os.cpu_count() or 1)
            options["include_dashboard"] = False
        else:
            options["address"] = address
            _refuse_silence(address)
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
        """How many GPUs its nodes have, whatever the machine of this process has."""
        return int(_totals(self._nodes())["GPU"])

    def reserve(self, bundles: Sequence[Bundle]) -> None:
        """Take room for the actors of a run.

        Raises:
            ConfigError: the cluster does not have it within 10 seconds.
        """
        ray = self.ray
        group = ray.util.placement_group(list(bundles), strategy="PACK")
        if ray.wait([group.ready()], timeout=RESERVE_S)[0]:
            self._group = group
            return
        ray.util.remove_placement_group(group)
        free = _totals([ray.available_resources()])
        nodes = self._nodes()
        largest = max(bundles, key=lambda bundle: (bundle.get("GPU", 0), bundle["CPU"]))
        raise ConfigError(
            f"the Ray cluster has no room for this run ({RESERVE_S:g} s). "
            f"Asked: {_words(_totals(bundles))}, as {len(bundles)} bundles, the largest "
            f"{_words(largest)}. Available: {_words(free)} of {_words(_totals(nodes))} on "
            f"{len(nodes)} nodes. Lower run.training_gpus or inference_engine.actors, or wait for "
            "what else runs there"
        )

    def _nodes(self) -> list[Mapping[str, float]]:
        """What every node that is alive has."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def put(self, thing: object) -> Any:
        """A reference to a thing in the object store, which every actor can read.

        Raises:
            EngineError: the object store has no room for it.
        """
        try:
            return self.ray.put(thing)
        except self.ray.exceptions.ObjectStoreFullError as error:
            reason = str(error).splitlines()[0]
            raise EngineError(
                f"Ray's object store, through which weights and batches travel, is full: {reason}. "
                "It is shared memory: give the node a larger /dev/shm, or start Ray with "
                "--object-store-memory"
            ) from error

    def start(self, actor: type, place: Place) -> Any:
        """A handle to a new actor at `place`.

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

    def close(self) -> None:
        """Give the room back, which ends every actor in it; end a cluster that was started here."""
        if hasattr(self, "_group"):
            self.ray.util.remove_placement_group(self._group)
        if self._started:
            self.ray.shutdown()


class LostActorError(EngineError):
    """An actor died, or did not answer in time. The message says which and what it was asked."""


def result_of(ray: Any, reference: Any, what: str, deadline: Deadline) -> Any:
    """What an actor's call returned; an exception of its code is raised here as it was there.

    Args:
        what: the actor and what it was asked, for the error.

    Raises:
        LostActorError: the actor died or did not answer in time.
    """
    try:
        return ray.get(reference, timeout=deadline.seconds)
    except ray.exceptions.GetTimeoutError as error:
        raise LostActorError(f"{what} did not answer within {deadline}") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ray.exceptions.RayError):
            raise _lost(what, error.cause) from error
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise _lost(what, error) from error


def _lost(what: str, error: Exception) -> EngineError:
    """What Ray's own error says: died, killed for memory, node lost, a module that is not there."""
    module = MISSING_MODULE.search(str(error))
    if module is None:
        return LostActorError(f"{what} died: {_reason(error)}")
    return EngineError(
        f"{what} could not start: its node has no module {module[1]!r}. Install the same packages "
        "on every node, or send oxRL itself with run.ray_working_dir: ship"
    )


def _reason(error: Exception) -> str:
    """The line of Ray's account of a death that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for words in TELLING:
        for line in lines:
            if words in line.lower():
                return line[:300]
    return lines[0][:300] if lines else type(error).__name__


def enter(directory: str) -> None:
    """Have an actor work where the driver does, so that relative paths mean the same.

    Raises:
        ConfigError: its node has no such directory.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            f"node {socket.gethostname()} cannot work in {directory}, where this run was started: "
            f"{error.strerror}. Start it from a directory that every node shares"
        ) from error


def call_on(engine: object, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Call a method as the engine's own class has it, or any other function of an engine."""
    method = getattr(engine, function.__name__, None)
    return function(engine, *inputs) if method is None else method(*inputs)


def pack(bucket: Bucket) -> Packed:
    """A bucket as the object store likes it."""
    packed: Packed = []
    for name, tensor in bucket:
        flat = tensor.detach().cpu().contiguous().view(-1)
        Passed.bytes += flat.nbytes
        packed.append((name, tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy()))
    return packed


def unpack(packed: Packed) -> Bucket:
    """The bucket again.

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


def _refuse_silence(address: str) -> None:
    """Ray itself tries an address that nobody answers at for minutes, and says little then.

    Raises:
        ConfigError: nobody listens there, or it is no head of a Ray cluster.
    """
    place = ADDRESS.fullmatch(address)
    if place is None:
        return  # auto, and what else Ray has names for
    try:
        with socket.create_connection((place["host"], int(place["port"])), CONNECT_S) as head:
            if "RAY_USE_TLS" not in os.environ:
                _greet(head)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"run.ray_address: no head of a Ray cluster answers at {address!r} within "
            f"{CONNECT_S:g} s: {error}. `ray status` on the head node tells its address; without "
            "one a run starts a cluster of its own on this machine"
        ) from error


def _greet(head: socket.socket) -> None:
    """Begin to talk as gRPC does, in HTTP/2: both sides send their settings first.

    Raises:
        ConnectionError: something else listens there.
        TimeoutError: whoever listens says nothing.
    """
    nothing_to_set = b"\0\0\0" + SETTINGS + b"\0" * 5
    head.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + nothing_to_set)
    answer = head.recv(9)
    if answer[3:4] != SETTINGS:
        raise ConnectionError(f"something else listens there, which says {answer!r}")


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
