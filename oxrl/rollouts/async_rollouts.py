"""Sampling ahead of training: the same calls as `sync.py`, with batches in flight in between.

The rollout batches come in blocks of `block`. Block b is sampled, by the weights at the start of
block b - 1, while block b - 1 trains. With k optimizer steps per rollout step, a sample is so at
most (2 block - 1) k weight versions old when it is trained on. Weights reach the sampler only
between blocks, so the version that samples a prompt never depends on how long anything took, and no
sample is thrown away for its age: admission bounds it (arXiv:2505.24298, section 5).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from oxrl.engines.sample.sampler import next_finished
from oxrl.errors import CheckpointError, InvariantError, Stopped
from oxrl.rollouts.rounds import choose_groups, still_missing
from oxrl.rollouts.sync import RolloutParts, RolloutStep, add_scored
from oxrl.runs.waiting import LOOK_S, StopAsked
from oxrl.types import Completion, Metrics, Request
from oxrl.usercode.messages import completion_of, encode_json

FILE = "samples.json"
# After a signal, how long a checkpoint waits for what is in flight, in seconds. It can only be
# finished by the weights that began it, so a checkpoint without it would not resume exactly; and a
# cluster that sends a signal often kills after half a minute.
SETTLE_S = 10.0


@dataclass
class Batch:
    """The positions [start, end) of the data order, dispatched in `rounds` parts for one step."""

    start: int
    end: int
    rounds: int = 1


@dataclass
class Held:
    """The state of a source between two rollout steps, to go back to where a signal cuts in."""

    batches: list[Batch]
    requests: dict[str, Request]
    done: dict[str, Completion]
    dispatched: int


class AheadRollouts:
    """A RolloutSource that keeps the next batches in flight while one trains.

    Args:
        parts: as for `SyncRollouts`.
        block: rollout batches that are sampled by the same weights.
        capacity: samples that may be in flight.
        rollout_steps: rollout steps of the whole run, after which nothing more is sampled.
        updates: optimizer steps per rollout step.
        background: whether the sampler works while the caller does something else.
    """

    def __init__(
        self,
        parts: RolloutParts,
        *,
        block: int,
        capacity: int,
        rollout_steps: int,
        updates: int,
        background: bool,
    ) -> None:
        self.parts = parts
        self.batches: list[Batch] = []
        self._block = block
        self._capacity = capacity
        self._rollout_steps = rollout_steps
        self._updates = updates
        self._requests: dict[str, Request] = {}
        self._done: dict[str, Completion] = {}
        self._counters: Metrics = {}
        self._held_counters: Metrics = {}
        self._counted = True
        self._thread = ThreadPoolExecutor(1, "sampling") if background else None
        self._working = None
        self._dispatched = 0
        self._leaving = False

    @property
    def in_flight(self) -> int:
        """See RolloutSource."""
        return len(self._requests)

    def next(self, draw: int, *, step: int) -> RolloutStep:
        """See RolloutSource. At the start of a block, the next one goes to the sampler."""
        self._count()
        held = self._held()
        try:
            return self._next(draw, step)
        except Stopped:
            self._go_back(held)
            raise

    def _next(self, draw: int, step: int) -> RolloutStep:
        rollout_step = step // self._updates
        starts_block = rollout_step % self._block == 0
        left = self._rollout_steps - rollout_step  # from this one on
        with self.parts.clock.phase("time/rollout_s"):
            began = not self.batches
            if began:
                self.parts.delivery.deliver(step)
                most = max(1, min(self._block, left))
                self._dispatch_batches(draw, most)
        found = self._finish(self.batches[0], step=step)
        with self.parts.clock.phase("time/rollout_s"):
            if starts_block:
                self._settle(self.parts.stop)
            self._hand_over(found)
            if starts_block:
                if not began:
                    self.parts.delivery.deliver(step)
                start = self.batches[-1].end if self.batches else found.next_draw
                more = left - 1 - len(self.batches)
                self._dispatch_batches(start, min(self._block, more))
        found.dispatched = self._dispatched
        self._dispatched = 0
        found.delivered = self.parts.delivery.remember(found.rollouts)
        return found

    def lend(self, step: int) -> None:
        """See RolloutSource."""
        self._settle(self.parts.stop)
        self.parts.delivery.deliver(step)

    def _settle(self, stop: StopAsked) -> None:
        """Wait until everything in flight is sampled and the sampler is idle.

        Raises:
            Stopped: `stop` said so.
        """
        if self._working is None:
            self._poll(stop)
        else:
            while not wait([self._working], timeout=LOOK_S).done:
                if stop():
                    raise Stopped
            working = self._working
            self._working = None
            working.result()
        self._count()

    def close(self) -> None:
        """Stop sampling; what is in flight is lost with the run."""
        self._leaving = True
        if self._thread is not None:
            self._thread.shutdown()

    def save(self, directory: Path) -> None:
        """Finish what is in flight, by the weights that began it, and write it.

        Raises:
            Stopped: a signal asked to stop, and that takes longer than SETTLE_S.
        """
        end = monotonic() + SETTLE_S

        def too_late() -> bool:
            return bool(self.parts.stop()) and monotonic() > end

        self._settle(too_late)
        content = {
            "batches": self.batches,
            "completions": self._done,
            "counters": self._counters,
            "dispatched": self._dispatched,
        }
        (directory / FILE).write_text(encode_json(content), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            CheckpointError: columns are recorded that are not there, or not what was written.
        """
        path = directory / FILE
        content = json.loads(path.read_text(encoding="utf-8"))
        self.batches = [Batch(**batch) for batch in content["batches"]]
        for batch in self.batches:
            for request in self.parts.requests.at(range(batch.start, batch.end)):
                self._requests[request.id] = request
        try:
            for id, stored in content["completions"].items():
                self._done[id] = completion_of(stored, self.parts.columns)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self._counters = content["counters"]
        self._dispatched = content["dispatched"]
        if self._requests.keys() != self._done.keys():
            raise InvariantError(f"{path} holds other samples than its batches {self.batches} need")

    def _held(self) -> Held:
        return Held(
            batches=[replace(batch) for batch in self.batches],
            requests=dict(self._requests),
            done=dict(self._done),
            dispatched=self._dispatched,
        )

    def _go_back(self, held: Held) -> None:
        """Forget what was asked for since; it is asked for again after a resume."""
        new = [id for id in self._requests if id not in held.requests]
        if new:
            # Nothing works in the background where a step is cut short after it dispatched.
            self.parts.sampler.abort(new)
            self.parts.sampler.metrics()
            self._counted = True
        finished = {id: done for id, done in self._done.items() if id in held.requests}
        self.batches = held.batches
        self._requests = held.requests
        self._done = held.done | finished
        self._counters = self._held_counters
        self._dispatched = held.dispatched

    def _dispatch_batches(self, start: int, count: int) -> None:
        """Dispatch `count` batches from position `start` on, and let the sampler work on them."""
        for _ in range(count):
            batch = Batch(start, start + self.parts.prompts_per_step)
            self._dispatch(range(batch.start, batch.end))
            self.batches.append(batch)
            start = batch.end
        if self._thread is None:
            self._settle(self.parts.stop)
        else:
            self._working = self._thread.submit(self._poll, lambda: self._leaving)

    def _dispatch(self, draws: Sequence[int]) -> None:
        """Submit the requests of `draws`.

        Raises:
            InvariantError: more would be in flight than the capacity.
        """
        requests = self.parts.requests.at(draws)
        if len(self._requests) + len(requests) > self._capacity:
            raise InvariantError(
                f"{len(requests)} samples are dispatched while {len(self._requests)} are in "
                f"flight, and the buffer holds {self._capacity}"
            )
        self._requests.update((request.id, request) for request in requests)
        self._dispatched += len(requests)
        self.parts.sampler.submit(requests)

    def _finish(self, batch: Batch, *, step: int) -> RolloutStep:
        """Wait for the samples of `batch` and score them, in as many rounds as it takes."""
        found = RolloutStep(step=step, start=batch.start, end=batch.start)
        while found.end < batch.end:
            sampled = self._wait_for(range(found.end, batch.end))
            found.rounds = batch.rounds - 1
            add_scored(found, self.parts, sampled)
            missing = still_missing(found, self.parts)
            if missing:
                # An evaluation may have been in between, and must not matter.
                if self.parts.sampler.version != step:
                    self.parts.delivery.deliver(step)
                self._dispatch(range(batch.end, batch.end + missing))
                batch.end += missing
                batch.rounds += 1
        choose_groups(found, self.parts)
        return found

    def _wait_for(self, draws: Sequence[int]) -> list[tuple[Request, Completion]]:
        """The samples of `draws` in the order dispatched."""
        wanted = [request for request in self._requests.values() if request.draw in draws]
        with self.parts.clock.phase("time/rollout_s"):
            while any(request.id not in self._done for request in wanted):
                self._settle(self.parts.stop)
        return [(request, self._done[request.id]) for request in wanted]

    def _hand_over(self, found: RolloutStep) -> None:
        """The oldest batch leaves, and with it the sampler's counters."""
        self._count()
        found.sampler = self._counters
        self._counters = dict.fromkeys(self._counters, 0.0)
        batch = self.batches.pop(0)
        for id, request in list(self._requests.items()):
            if batch.start <= request.draw < batch.end:
                del self._requests[id]
                del self._done[id]

    def _count(self) -> None:
        """Add the sampler's counters, where it is idle and did something."""
        if self._working is None and not self._counted:
            self._counters = added(self._counters, self.parts.sampler.metrics())
            self._counted = True
        self._held_counters = self._counters

    def _poll(self, stop: StopAsked) -> None:
        """Sample until nothing in flight is missing."""
        deadline_s = self.parts.deadline_s
        while missing := [id for id in self._requests if id not in self._done]:
            finished = next_finished(self.parts.sampler, missing, stop=stop, deadline_s=deadline_s)
            for item in finished:
                self._done[item.request.id] = item.completion
                self.parts.on_finished(item)
            self._counted = False


def added(before: Metrics, new: Metrics) -> Metrics:
    """Counters of a sampler over two spans of work; of rates those of the second.

    A mean is over decoding steps, and of whole numbers: so that it can be taken apart again.
    """
    steps = "rollout/decode_steps"
    mean = "rollout/mean_active_rows"
    both = {name: value + before.get(name, 0.0) for name, value in new.items()}
    for name in new:
        if name.startswith("throughput/"):
            both[name] = new[name]
    if mean in both and steps in both:
        rows = [round(part.get(mean, 0.0) * part.get(steps, 0.0)) for part in (before, new)]
        both[mean] = sum(rows) / max(1.0, both[steps])
    return both
