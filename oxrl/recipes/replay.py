"""The replay buffer: every sample from its dispatch until a rollout step takes it to train on it or
to drop it.

With `rollout.max_staleness` 0 a batch is dispatched, sampled and taken before the next one. Above
that, waves of W
batches are sampled while earlier ones train: with k optimizer steps per rollout step, wave b
samples by the weights of version bWk what is trained on at versions (b+1)Wk to (b+2)Wk - k, at most
(2W - 1)k later. Weights reach the sampler only between waves, so the version that samples a prompt
never depends on how long anything took, and no sample is
thrown away for its age: admission bounds it (arXiv:2505.24298, section 5).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from oxrl.engines.sample.base import RolloutEngine
from oxrl.errors import DeadlineError, InvariantError
from oxrl.types import Completion, Metrics, Request, Segment

FILE = "samples.json"
# How long a signal may go unseen while the sampler works in the background, in seconds.
LOOK_S = 0.2


@dataclass
class Batch:
    """The positions [start, end) of the data order, dispatched in `rounds` parts for one rollout
    step.
    """

    start: int
    end: int
    rounds: int = 1


class ReplayBuffer:
    """Samples in data order, with the books: dispatched = trained + dropped for a reason + in
    flight.

    Args:
        sampler: where requests go.
        ask: the requests of positions of the data order; the same ones every time.
        capacity: samples that may be in flight: dispatched, and not yet taken.
        background: whether `work` lets the sampler run while the caller does something else.
    """

    def __init__(
        self,
        sampler: RolloutEngine,
        ask: Callable[[Sequence[int]], list[Request]],
        *,
        capacity: int,
        deadline_s: float,
        background: bool,
    ) -> None:
        self.batches: list[Batch] = []
        self.books: dict[str, int] = {}
        self._sampler, self._ask, self._capacity, self._deadline_s = (
            sampler,
            ask,
            capacity,
            deadline_s,
        )
        self._requests: dict[str, Request] = {}
        self._done: dict[str, Completion] = {}
        self._counters: Metrics = {}
        self._counted = True
        self._thread = ThreadPoolExecutor(1, "sampling") if background else None
        self._working: Future[bool] | None = None
        self._leaving = False

    def dispatch(self, start: int, count: int, *, batch: Batch | None = None) -> None:
        """Submit the next `count` positions: a batch of their own, or one more round of `batch`,
        the last one.

        Raises:
            InvariantError: more would be in flight than the buffer holds.
        """
        requests = self._ask(range(start, start + count))
        if len(self._requests) + len(requests) > self._capacity:
            raise InvariantError(
                f"{len(requests)} samples are dispatched while {len(self._requests)} are in flight, and the buffer "
                f"holds {self._capacity}"
            )
        if batch is None:
            self.batches.append(Batch(start, start + count))
        else:
            batch.end, batch.rounds = start + count, batch.rounds + 1
        self._requests.update((request.id, request) for request in requests)
        self.books["dispatched"] = self.books.get("dispatched", 0) + len(requests)
        self._sampler.submit(requests)

    def work(self) -> None:
        """Sample in the background what is in flight, or all of it now where nothing can."""
        if self._thread is None:
            self.settle()
        else:
            self._working = self._thread.submit(self._poll, lambda: self._leaving)

    def settle(self, stop: Callable[[], object] = lambda: False) -> bool:
        """Wait until everything in flight is sampled and the sampler is idle; False as soon as
        `stop` says so.
        """
        if self._working is None:
            return self._poll(stop)
        while not wait([self._working], timeout=LOOK_S).done:
            if stop():
                return False
        settled, self._working = self._working.result(), None
        return settled

    def _poll(self, stop: Callable[[], object]) -> bool:
        while missing := [id for id in self._requests if id not in self._done]:
            if stop():
                return False
            finished = self._sampler.poll(self._deadline_s)
            if not finished:
                raise DeadlineError(
                    f"the sampler is idle but {len(missing)} requests never finished: {missing[:5]}"
                )
            self._done.update((item.request.id, item.completion) for item in finished)
            self._counted = False
        return True

    def _count(self) -> None:
        """Take over the sampler's counters, where it is idle and did something."""
        if self._working is None and not self._counted:
            self._counters, self._counted = self._sampler.metrics(), True

    def sampled(self, start: int, end: int) -> list[tuple[Request, Completion]] | None:
        """The samples of these positions, in the order dispatched; None while some are missing."""
        asked = [
            (id, request) for id, request in self._requests.items() if start <= request.draw < end
        ]
        done = [(request, self._done[id]) for id, request in asked if id in self._done]
        return done if len(done) == len(asked) else None

    def take(self) -> None:
        """The oldest batch leaves: its samples are the caller's to `account` for."""
        self._count()
        batch = self.batches.pop(0)
        for id in [
            id for id, request in self._requests.items() if batch.start <= request.draw < batch.end
        ]:
            del self._requests[id], self._done[id]

    def forget(self) -> None:
        """Give up what is in flight as if it had never been dispatched: it will be sampled
        again.
        """
        self._sampler.abort([id for id in self._requests if id not in self._done])
        self.books["dispatched"] -= len(self._requests)
        self.batches, self._requests, self._done = [], {}, {}

    def account(self, *, trained: int, dropped: dict[str, int]) -> Metrics:
        """Enter what became of the batch taken last; the books of the whole run, and the sampler's
        counters.

        Raises:
            InvariantError: a sample was lost, or counted twice.
        """
        entries = {"trained": trained} | {
            f"dropped_{reason}": count for reason, count in dropped.items()
        }
        for name, count in entries.items():
            self.books[name] = self.books.get(name, 0) + count
        books = self.books | {"in_flight": len(self._requests)}
        ended = sum(books.values()) - books["dispatched"]
        if ended != books["dispatched"]:
            raise InvariantError(
                f"{books['dispatched']} samples were dispatched but {ended} are accounted for: {books}"
            )
        counters, self._counters = self._counters, dict.fromkeys(self._counters, 0.0)
        return counters | {f"samples/{name}": float(count) for name, count in books.items()}

    def save(self, directory: Path) -> None:
        """Finish what is in flight, by the weights that began it, and write it into the
        checkpoint.
        """
        self.settle()
        self._count()
        completions = {id: dataclasses.asdict(completion) for id, completion in self._done.items()}
        batches = [dataclasses.asdict(batch) for batch in self.batches]
        content = {"batches": batches, "completions": completions, "counters": self._counters}
        (directory / FILE).write_text(json.dumps(content), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        content = json.loads((directory / FILE).read_text(encoding="utf-8"))
        self.batches = [Batch(**batch) for batch in content["batches"]]
        asked = [
            request
            for batch in self.batches
            for request in self._ask(range(batch.start, batch.end))
        ]
        self._requests = {request.id: request for request in asked}
        self._done = {id: _completion(**fields) for id, fields in content["completions"].items()}
        self._counters = content["counters"]
        if self._requests.keys() != self._done.keys():
            raise InvariantError(
                f"{directory / FILE} holds other samples than its batches {self.batches} ask for"
            )

    def close(self) -> None:
        """Stop sampling; what is in flight is lost with the run."""
        self._leaving = True
        if self._thread is not None:
            self._thread.shutdown()


def _completion(*, segments: list[dict[str, object]], **fields: object) -> Completion:
    tuples = [
        {name: tuple(v) if isinstance(v, list) else v for name, v in segment.items()}
        for segment in segments
    ]
    return Completion(segments=tuple(Segment(**segment) for segment in tuples), **fields)  # pyright: ignore
