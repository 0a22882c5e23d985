"""The interface of engines that sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from oxrl.engines.train.base import Buckets, Fingerprints
from oxrl.errors import DeadlineError, Stopped
from oxrl.runs.waiting import Patience, StopAsked, never
from oxrl.types import Completion, Metrics, Request, Requests

# Rows of token ids, of any lengths.
TokenRows = Sequence[Sequence[int]]
# Of each row the names of the images that it shows; empty: no row shows any.
ShownImages = Sequence[Sequence[str]]
# Of each row the log-probability of every token, in nats.
RowLogprobs = list[list[float]]


@dataclass(frozen=True)
class Finished:
    """A request and its completion, as `poll` and `abort` return them."""

    request: Request
    completion: Completion


class RolloutEngine(Protocol):
    """An engine that samples responses: a queue of requests, worked off while `poll` is called."""

    @property
    def version(self) -> int:
        """Weight version that the next token is sampled with."""
        ...

    def submit(self, requests: Requests) -> None:
        """Take requests in; nothing is sampled before `poll`.

        Args:
            requests: with ids that no request in flight has.

        Raises:
            EngineError: an id that is in flight, an empty prompt, or a request (prompt and
                `max_tokens`) longer than the engine's context.
        """
        ...

    def poll(self, deadline_s: float) -> Responses:
        """Sample until at least one request finishes, or nothing is left.

        Args:
            deadline_s: seconds to wait for a finished request.

        Returns:
            All that have finished since the last call, in any order; empty: nothing is left.

        Raises:
            DeadlineError: no request finished within `deadline_s`; everything stays in flight.
        """
        ...

    def abort(self, ids: Sequence[str]) -> Responses:
        """Stop requests; what was sampled so far comes back with finish_reason "abort".

        Args:
            ids: of requests; those that are not in flight are ignored.

        Returns:
            One completion for each of `ids` in flight, with no tokens if none were sampled.
        """
        ...

    def update_weights(self, buckets: Buckets, version: int) -> Fingerprints:
        """Load weights between polls, drop every cached key and value; requests go on with them.

        Args:
            buckets: (Hugging Face name, tensor) of every weight, some at a time.
            version: weight version of what is sampled from now on.

        Returns:
            The fingerprint of each tensor that was copied, where it arrived, by name.

        Raises:
            WeightSyncError: a weight is unknown, missing, or of another shape.
        """
        ...

    def held(self) -> Fingerprints:
        """Read every weight again, as the engine computes with it now.

        Returns:
            The fingerprint of each weight: of the whole one under its Hugging Face name, and under
            a name of the engine's own where it does not know which part of which weight it holds.
        """
        ...

    def logprobs(
        self,
        rows: TokenRows,
        temperature: float = 1.0,
        shown: ShownImages = (),
    ) -> RowLogprobs:
        """Score rows of token ids: what the delivery probe compares.

        Args:
            rows: token ids, any lengths.
            temperature: logits are divided by it.
            shown: names of the images of each row; empty: there are none.

        Returns:
            Log-probability in nats of each token given those before it, as long as its row; the
            first entry is 0.0.
        """
        ...

    def metrics(self) -> Metrics:
        """Return the counters since the last call, keys `rollout/...` and `throughput/...`."""
        ...

    def sleep(self) -> None:
        """Give memory back while nothing is sampled; requests stay in flight."""
        ...

    def wake(self) -> None:
        """Take the memory again, before anything is sampled."""
        ...

    def close(self) -> None:
        """Drop every request and end what the engine has started."""
        ...


Responses = list[Finished]
# Who is told of a response when it is finished.
Heard = Callable[[Finished], object]


def unheard(finished: Finished) -> None:
    """Drop a finished request: nobody waits for single responses.

    Args:
        finished: is dropped.
    """


def generate(
    engine: RolloutEngine,
    requests: Requests,
    *,
    deadline_s: float,
    stop: StopAsked = never,
    heard: Heard = unheard,
) -> list[Completion]:
    """Submit requests and poll until all are done.

    Args:
        engine: idle; what else is in flight would be taken out of it too.
        requests: with ids that differ.
        deadline_s: seconds to wait for each next finished request.
        stop: whether the run was asked to stop.
        heard: is told of every response as soon as it is finished.

    Returns:
        Completions in the order of `requests`.

    Raises:
        DeadlineError: nothing finished within `deadline_s`, or the engine lost a request.
        Stopped: a signal asked to stop; nothing of `requests` is left in flight.
        EngineError: the engine refuses a request.
    """
    patience = Patience(stop, deadline_s)
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while missing := [request.id for request in requests if request.id not in done]:
        try:
            finished = next_finished(engine, patience, missing)
        except Stopped:
            engine.abort(missing)
            raise
        for item in finished:
            done[item.request.id] = item.completion
            heard(item)
    return [done[request.id] for request in requests]


def next_finished(engine: RolloutEngine, patience: Patience, missing: Sequence[str]) -> Responses:
    """Poll until something finishes, and look for signals in between.

    Args:
        engine: that they are in.
        patience: how long to wait in all, and whom to ask whether to stop.
        missing: ids of what is in flight.

    Returns:
        At least one finished request, of whichever.

    Raises:
        DeadlineError: nothing finished within the deadline, or the engine is idle.
        Stopped: a signal asked to stop; everything stays in flight.
    """
    what = "a sampled response"
    while True:
        patience.look(what)
        try:
            finished = engine.poll(patience.slice_s)
        except DeadlineError as error:
            # The engine waited for a short while only; where it is, and what to do, is its to say.
            what = f"a sampled response: {str(error).partition(': ')[2] or error}"
            continue
        if not finished:
            raise DeadlineError(
                f"the rollout engine is idle but {len(missing)} requests never finished: "
                f"{missing[:5]}"
            )
        patience.answered()
        return finished
