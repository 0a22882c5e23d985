"""Ray's part in the engines, played by threads of this process: actors start in no time.

An actor works off one call after the other. Dead ones answer nobody and leave their lines. Training
ranks here are whole copies of a model, as without a process group there are no collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for
from types import SimpleNamespace
from typing import Any, cast

from oxrl.engines.ray.cluster import Cluster, pack

HOST = "127.0.0.1"


class RayError(Exception):
    pass


class ActorDiedError(RayError):
    pass


class GetTimeoutError(RayError):
    pass


class ObjectStoreFullError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Stored:
    """A reference to a thing in the object store."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __reduce__(self) -> Any:
        return Stored, (None,)  # what travels is a reference


class Actor:
    """The handle of an actor."""

    def __init__(self, kind: type) -> None:
        self._object = kind()
        self._calls = ThreadPoolExecutor(1)
        self._dead = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *inputs: self._begin(name, inputs))

    @property
    def __ray_call__(self) -> Any:
        return SimpleNamespace(remote=lambda function: self._begin("", (function,)))

    def _begin(self, name: str, inputs: Sequence[Any]) -> Future[Any]:
        found: Future[Any] = Future()
        self._calls.submit(self._answer, found, name, inputs)
        return found

    def _answer(self, found: Future[Any], name: str, inputs: Sequence[Any]) -> None:
        given = [thing.thing if isinstance(thing, Stored) else thing for thing in inputs]
        try:
            if self._dead.is_set():
                raise ActorDiedError("The actor is dead because its process has died.")
            work = getattr(self._object, name) if name else given.pop(0)
            answer = work(*given) if name else work(self._object)
            if self._dead.is_set():
                raise ActorDiedError("The actor is dead because its process has died.")
        except RayError as error:
            found.set_exception(error)
        except BaseException as error:  # noqa: BLE001  (raised where the call is waited for)
            found.set_exception(RayTaskError(error))
        else:
            found.set_result(answer)

    def die(self) -> None:
        self._dead.set()
        receiver = getattr(getattr(self._object, "_end", None), "_receiver", None)
        if receiver is not None:
            receiver.cut()


class Ray:
    """What the engines call of Ray."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayTaskError=RayTaskError,
        GetTimeoutError=GetTimeoutError,
        ObjectStoreFullError=ObjectStoreFullError,
    )
    util = SimpleNamespace(get_node_ip_address=lambda: HOST)

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        if isinstance(reference, Stored):
            return reference.thing
        try:
            return reference.result(timeout)
        except FutureTimeout:
            raise GetTimeoutError(f"{timeout} s") from None

    def wait(
        self, references: Sequence[Any], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        del num_returns
        done, _ = wait_for(references, timeout, FIRST_COMPLETED)
        return [r for r in references if r in done], [r for r in references if r not in done]

    def put(self, thing: Any) -> Stored:
        return Stored(thing)

    def kill(self, actor: Actor) -> None:
        actor.die()


class ThreadCluster:
    """See Cluster."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    def start(self, kind: type, place: object) -> Actor:
        del place
        return Actor(kind)

    def put(self, thing: object) -> Any:
        return self.ray.put(thing)

    def put_buckets(self, buckets: Iterable[Any]) -> list[Any]:
        return [self.put(pack(bucket)) for bucket in buckets]

    def result_of(self, reference: Any, what: str, deadline: Any) -> Any:
        return Cluster.result_of(cast(Cluster, self), reference, what, deadline)

    def wait(
        self, references: Sequence[Any], *, timeout: float, count: int = 1
    ) -> tuple[list[Any], list[Any]]:
        return self.ray.wait(list(references), num_returns=count, timeout=timeout)

    def end(self, actor: Actor) -> None:
        self.ray.kill(actor)

    def await_place(self, place: object, deadline: object) -> None:
        del place, deadline

    def reserve(self, bundles: object) -> None:
        del bundles

    def close(self) -> None:
        pass
