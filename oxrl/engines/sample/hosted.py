"""Processes of this machine around rollout engines, for `RolloutWorkers` without Ray.

A process serves `sample/host.py`. It is asked in lines of JSON, over a socket of which it alone has
the other end: what it is to call goes there pickled, what comes back is JSON and nothing else.
Weights lie in memory that has no name, and is gone with this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from math import inf
from typing import Any, NamedTuple

from safetensors.torch import save

from oxrl.engines.sample.host import ERRORS
from oxrl.engines.sample.workers import Answer, EngineActor, Laid, abort_answers
from oxrl.engines.train import Buckets
from oxrl.errors import EngineError, LostActorError, Stopped
from oxrl.runs.waiting import Patience
from oxrl.tables.watch import Deadline
from oxrl.usercode.given import packed
from oxrl.usercode.messages import completion_of
from oxrl.usercode.worker import LAST_WORDS_S, LostWorker, Printed, SuspectWorker, Worker

MODULE = "oxrl.engines.sample.host"
# Of one answer, in bytes: all that was sampled since the last one.
MOST_ANSWER = 1 << 30


class Wanted(Patience):
    """Patience that lasts until the process is ended: who asked it says how long that is."""

    def look(self, what: str) -> float:
        if self._cancelled:
            raise Stopped
        return self.slice_s


class Call(NamedTuple):
    """A method of what a process serves, which is called as that of a Ray actor is."""

    process: HostProcess
    name: str

    def remote(self, *inputs: Any) -> Future[Any]:
        """Queue the call behind those that were asked for before."""
        return self.process.calls.submit(self.process.ask, self.name, inputs)


class HostProcess:
    """The handle of a process, which works off one call after the other.

    Args:
        threads: that it computes with.
    """

    def __init__(self, threads: int) -> None:
        self._printed = Printed("a sampling process")
        self._worker = Worker(MODULE, self._printed, threads=threads)
        self._wanted = Wanted()
        self.calls = ThreadPoolExecutor(1, "sampling process")
        self.build = Call(self, "build")
        self.call = Call(self, "call")
        self.poll = Call(self, "poll")
        self.update_weights = Call(self, "update_weights")

    def ask(self, name: str, inputs: Sequence[Any]) -> Any:
        """Have a method called; what it answers.

        Raises:
            LostActorError: the process died.
        """
        given = packed(inputs)
        if given is None:
            raise EngineError(f"{name} is called with what cannot be sent to another process")
        request = {"method": name, **given}
        try:
            channel = self._worker.channel
            reply = channel.ask(request, inf, self._wanted, name, most=MOST_ANSWER)
        except (LostWorker, SuspectWorker) as error:
            ended = self._worker.end(LAST_WORDS_S)
            raise LostActorError(f"{error} {ended}".strip()) from error
        if "error" in reply:
            raise ERRORS[reply["error"]](reply["text"])
        answer = reply["value"]
        if name == "poll":
            answers, round = answer
            return _completed(answers), round
        return _completed(answer) if abort_answers in inputs else answer

    def end(self) -> None:
        """Kill the process and all that it started; calls that wait for an answer are cancelled."""
        self._wanted.cancel()
        self.calls.shutdown(cancel_futures=True)
        self._worker.end()
        self._printed.finish()


def _completed(answers: Iterable[Any]) -> list[Answer]:
    """Return what was sampled, from JSON."""
    return [(id, completion_of(fields)) for id, fields in answers]


class ThisMachine:
    """See Processes: everything is here.

    Args:
        threads: that each process computes with.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._weights = os.fdopen(os.memfd_create("oxrl-weights"), "wb")
        self._started: list[HostProcess] = []

    def start(self, actor: type[EngineActor], place: None) -> HostProcess:
        started = HostProcess(self._threads)
        self._started.append(started)
        return started

    def end(self, actor: HostProcess) -> None:
        actor.end()

    def wait(
        self, references: Sequence[Future[Any]], *, timeout: float, count: int = 1
    ) -> tuple[list[Any], list[Any]]:
        until = FIRST_COMPLETED if count == 1 else ALL_COMPLETED
        done, others = wait_for(references, timeout, until)
        return [*done], [*others]

    def result_of(self, reference: Future[Any], what: str, deadline: Deadline) -> Any:
        done, _ = wait_for([reference], deadline.seconds)
        if not done:
            raise LostActorError(f"{what} did not answer within {deadline}")
        try:
            return reference.result()
        except LostActorError as lost:
            raise LostActorError(f"{what} died: {lost}") from lost

    def put_buckets(self, buckets: Buckets) -> list[Laid]:
        """See Processes: one after the other into memory, over what was there."""
        path = f"/proc/{os.getpid()}/fd/{self._weights.fileno()}"
        laid: list[Laid] = []
        self._weights.seek(0)
        for bucket in buckets:
            at = self._weights.tell()
            # Copies: safetensors refuses tensors that share memory, as tied ones do.
            tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in bucket}
            size = self._weights.write(save(tensors))
            laid.append(Laid(path, at, size))
        self._weights.flush()
        return laid

    def await_place(self, place: None, deadline: Deadline) -> None:
        """Return at once: there is room."""

    def close(self) -> None:
        """End every process, and give the memory of the weights back."""
        for process in self._started:
            process.end()
        self._weights.close()
