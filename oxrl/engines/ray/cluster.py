"""A Ray cluster with room reserved for every actor of a run, and calls to actors that end.

Without an address oxRL starts a cluster of its own on this machine: no dashboard, every port on the
loopback device.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from oxrl.engines.train.base import Bucket
from oxrl.errors import ConfigError, EngineError, MissingExtraError

if TYPE_CHECKING:
    import numpy

log = logging.getLogger(__name__)

RESERVE_S = 10.0
# Importing libraries and reading a model's files may take this long, whatever the deadline of other
# calls is.
LOAD_S = 600.0
# What a bundle or a node has: how many of "CPU" and "GPU".
Bundle = dict[str, float]
# (name, dtype, shape, bytes): numpy arrays travel through Ray's object store without a copy per
# reader.
Packed = list[tuple[str, torch.dtype, torch.Size, "numpy.ndarray[Any, Any]"]]


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
        bundles = [_bundle(2, trainer_gpus) for _ in shared]
        return Layout(bundles, shared[:trainers], shared[:samplers])
    gpus = [trainer_gpus] * trainers + [sampler_gpus] * samplers
    places = [Place(i, own) for i, own in enumerate(gpus)]
    bundles = [_bundle(1, own) for own in gpus]
    return Layout(bundles, places[:trainers], places[trainers:])


def _bundle(cpus: float, gpus: float) -> Bundle:
    return {"CPU": cpus} | ({"GPU": gpus} if gpus else {})


class Cluster:
    """A Ray cluster, joined at `address` or started for this process, with `bundles` reserved.

    A process that is connected to a cluster already keeps it, and keeps it afterwards.

    Raises:
        ConfigError: the cluster cannot be reached, or does not have what was asked for within 10
            seconds.
        MissingExtraError: Ray is not installed.
    """

    def __init__(self, bundles: Sequence[Bundle], *, address: str | None = None) -> None:
        self.ray = _import_ray(loopback=address is None)
        self._started = not self.ray.is_initialized()
        if self._started:
            self._connect(address, sum(bundle["CPU"] for bundle in bundles))
        try:
            self._group = self._reserve(bundles)
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None, cpus: float) -> None:
        # CPUs are names for places here, not a share of a core: a small machine may run more actors
        # than it has cores.
        own: dict[str, Any] = {
            "num_cpus": max(int(cpus), os.cpu_count() or 1),
            "include_dashboard": False,
        }
        options = own if address is None else {"address": address}
        where = f"at run.ray_address {address!r}" if address else "could be started here"
        try:
            with _own_signals():
                self.ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"no Ray cluster {where}: {reason}") from error

    def _reserve(self, bundles: Sequence[Bundle]) -> Any:
        ray = self.ray
        group = ray.util.placement_group(list(bundles), strategy="PACK")
        if ray.wait([group.ready()], timeout=RESERVE_S)[0]:
            return group
        ray.util.remove_placement_group(group)
        free = _totals([ray.available_resources()])
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        largest = max(bundles, key=lambda bundle: (bundle.get("GPU", 0), bundle["CPU"]))
        raise ConfigError(
            f"the Ray cluster has no room for this run ({RESERVE_S:g} s). "
            f"Asked: {_words(_totals(bundles))}, as {len(bundles)} bundles, the largest "
            f"{_words(largest)}. Available: {_words(free)} of {_words(_totals(nodes))} on "
            f"{len(nodes)} nodes. Lower run.training_gpus or inference_engine.actors, or wait for "
            "what else runs there"
        )

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


def result_of(ray: Any, reference: Any, what: str, *, deadline_s: float) -> Any:
    """What an actor's call returned; an exception of its code is raised here as it was there.

    Args:
        what: the actor and what it was asked, for the error.

    Raises:
        LostActorError: the actor died or did not answer within `deadline_s`.
    """
    try:
        return ray.get(reference, timeout=deadline_s)
    except ray.exceptions.GetTimeoutError as error:
        raise LostActorError(f"{what} did not answer within {deadline_s:g} s") from error
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
        raise LostActorError(f"{what} died: {_reason(error)}") from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


def _reason(error: Exception) -> str:
    """The line of Ray's account of a death that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "dead because" in line or "exit" in line.lower()]
    return (telling or lines)[0][:300]


def call_on(engine: object, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Call a method as the engine's own class has it, or any other function of an engine."""
    method = getattr(engine, function.__name__, None)
    return function(engine, *inputs) if method is None else method(*inputs)


def pack(bucket: Bucket) -> Packed:
    """A bucket as the object store likes it."""
    packed: Packed = []
    for name, tensor in bucket:
        flat = tensor.detach().cpu().contiguous().view(-1)
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
