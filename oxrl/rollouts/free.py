"""`rollout.schedule: free`: sampling goes on while a batch trains, and the clock decides.

Everything but time is as in `continuous.py`: which draws are admitted, the bound on the age of
tokens, the books, batches in the order of the data. A batch is handed over as soon as it is
complete. Weights and requests then go in at whatever round the sampler is, so two runs differ; what
was decided is in schedule.jsonl, and `oxrl replay RUN --schedule` goes through it without a clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from pathlib import Path
from threading import Event

from oxrl.engines.sample.parked import ParkingEngine
from oxrl.engines.sample.workers import RolloutWorkers
from oxrl.errors import CheckpointError, Stopped
from oxrl.rollouts.continuous import ContinuousRollouts
from oxrl.rollouts.schedule import Mark, ScheduleFile
from oxrl.rollouts.sync import RolloutParts, RolloutStep
from oxrl.runs.files import pretty_json, read_json, write_atomically
from oxrl.runs.waiting import Patience, StopAsked, no_stop

log = logging.getLogger(__name__)

# A pause for new weights waits for a poll of this length, in seconds.
POLL_S = 0.1
# Before every round: nothing is begun, what was begun is waited for.
NO_ROUND = 0
MARK = "schedule.json"


class FreeRollouts(ContinuousRollouts):
    """A RolloutSource whose sampler goes on without a look at its rounds.

    Args:
        parts, sampler, ahead, updates, rollout_steps, background: as of ContinuousRollouts. Without
            `background` nothing is sampled while a batch trains.
        path: of schedule.jsonl.
    """

    def __init__(
        self,
        parts: RolloutParts,
        sampler: ParkingEngine,
        *,
        ahead: int,
        updates: int,
        rollout_steps: int,
        background: bool,
        path: Path,
    ) -> None:
        super().__init__(
            parts,
            sampler,
            ahead=ahead,
            rounds=1,  # nobody counts them here
            updates=updates,
            rollout_steps=rollout_steps,
            background=background,
        )
        self._schedule = ScheduleFile(path)
        self._pausing = Event()

    def save(self, directory: Path) -> None:
        """Write what is in flight, and how far the schedule is."""
        super().save(directory)
        self._note_retries()
        mark = self._schedule.mark()
        write_atomically(directory / MARK, pretty_json(mark._asdict()))

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            CheckpointError: it is not what was written, or not what this run samples.
            RunDirectoryError: nor is schedule.jsonl.
        """
        super().load(directory)
        path = directory / MARK
        try:
            mark = Mark(**read_json(path) or {})
        except TypeError as error:
            raise CheckpointError(f"{path} does not say how far schedule.jsonl was") from error
        self._schedule.cut(mark)
        log.warning(
            "rollout.schedule is free: the clock decides what is sampled by which weights, so the "
            "resumed run is another one than if it had not been stopped. rollout.schedule=logical "
            "resumes to the byte"
        )

    def _next(self, draw: int, step: int) -> RolloutStep:
        self._note_retries()
        before = self._schedule.here
        rounds = enumerate(rounds_of(self._sampler))
        self._schedule.add(
            [{"weights": step, "worker": worker, "round": round} for worker, round in rounds]
        )
        try:
            found = super()._next(draw, step)
        except Stopped:
            self._schedule.cut(before)
            raise
        self._note_retries()
        self._schedule.add([{"batch": step, "draws": [found.start, found.next_draw]}])
        return found

    def _wait_for(self, draws: range) -> None:
        """Sample until every response of some draws is complete."""
        wanted = [request.id for request in self.books.of(draws)]

        def complete() -> bool:
            return all(id in self.books.completions for id in wanted)

        self._sample(complete, self.parts.stop)

    def _begin(self) -> None:
        """Let the sampler go on until it is asked for a pause."""
        if self._thread is not None and self.books.missing:
            self._pausing.clear()
            paused = self._pausing.is_set
            self._working = self._thread.submit(self._sample, paused, self._asked_to_leave)

    def _join(self, stop: StopAsked) -> None:
        """Let the poll that the sampler is in be its last one, and wait for it."""
        self._pausing.set()
        super()._join(stop)

    def _sample(self, over: Callable[[], bool], stop: StopAsked) -> None:
        """Sample until it is over, or until nothing is missing; then no poll is in flight."""
        with self._waits.sampling():
            self._poll_until(over, stop)

    def _poll_until(self, over: Callable[[], bool], stop: StopAsked) -> None:
        patience = Patience(stop, self.parts.deadline_s)
        try:
            while (missing := self.books.missing) and not over():
                if not self._poll(patience, inf, POLL_S):
                    raise self._lost(missing)
        except Stopped:
            self._settle()
            raise
        self._settle()

    def _settle(self) -> None:
        """Wait for the polls that workers are in."""
        patience = Patience(no_stop, self.parts.deadline_s)
        while self._poll(patience, NO_ROUND, POLL_S):
            pass

    def _note_retries(self) -> None:
        """Write which requests are sampled again, because their worker was lost."""
        if isinstance(self._sampler, RolloutWorkers):
            retries = self._sampler.taken_retries()
            self._schedule.add([{"retry": id, "worker": worker} for id, worker in retries])


def rounds_of(sampler: ParkingEngine) -> list[int]:
    """The round of each worker of a sampler; of a sampler in this process its own."""
    if isinstance(sampler, RolloutWorkers):
        return [worker.round for worker in sampler.workers]
    return [sampler.round]
