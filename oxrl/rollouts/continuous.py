"""Sampling that goes on while a batch trains, under a bound on the age of its tokens.

Batch b is admitted once batch b - ahead - 1 is trained. So the oldest token of a row is at most
`ahead` batches older than the update that begins with it, and nothing is ever dropped for its age.

Time is counted in rounds of the sampler, in each of which every active row gets a token. Weights
change and requests go in between two windows of `rounds` rounds each, and a batch trains for
exactly one of them: who is early waits. What is sampled by which weights so depends on nothing that
a clock measures. In one process the window passes before the update, by the same weights, so that
one process and samplers of their own give the same samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

from oxrl.engines.sample.parked import ParkingEngine
from oxrl.errors import CheckpointError, DeadlineError, Stopped
from oxrl.rollouts.async_rollouts import added
from oxrl.rollouts.rounds import choose_groups, still_missing
from oxrl.rollouts.sync import RolloutParts, RolloutStep, add_scored
from oxrl.rollouts.whole_samples import rollouts_of, written
from oxrl.runs.waiting import LOOK_S, Patience, StopAsked, no_stop
from oxrl.tables.columns import Columns
from oxrl.types import Completion, Metrics, Request, Rollout
from oxrl.usercode.messages import completion_of, encode_json

FILE = "samples.json"


@dataclass
class Books:
    """Every draw that was asked for and is not handed over: it is in one of three states.

    Each response is asked for (its request alone), complete (its completion as well) or scored,
    with the whole group of its draw.

    end: the draws below it were asked for. requests, completions: by id, in the order of asking.
    scored: groups that were scored and not needed, by draw. dispatched: requests since the last
    hand-over.
    """

    end: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    completions: dict[str, Completion] = field(default_factory=dict)
    scored: dict[int, list[Rollout]] = field(default_factory=dict)
    dispatched: int = 0

    @property
    def missing(self) -> list[str]:
        """Ids of the requests that have no completion."""
        return [id for id in self.requests if id not in self.completions]

    @property
    def unfinished(self) -> int:
        """Responses that are not handed over."""
        return len(self.requests) + sum(map(len, self.scored.values()))

    def of(self, draws: range) -> list[Request]:
        """The requests of some draws, in the order of asking."""
        return [request for request in self.requests.values() if request.draw in draws]

    def copy(self) -> Books:
        """The same books, which do not change with these."""
        return replace(
            self,
            requests=dict(self.requests),
            completions=dict(self.completions),
            scored=dict(self.scored),
        )


@dataclass(frozen=True)
class Snapshot:
    """A source between two rollout steps, to go back to where a signal cuts in."""

    books: Books
    engine: dict[str, Any]
    counters: Metrics


class ContinuousRollouts:
    """A RolloutSource whose sampler goes on while a batch trains.

    Args:
        parts: as for `SyncRollouts`; the sampler is a ParkingEngine.
        ahead: batches that a token may be older than the update that begins with it.
        rounds: decode rounds for which a batch trains.
        updates: optimizer steps per rollout step.
        rollout_steps: of the whole run, after which nothing more is sampled.
        background: whether the sampler works while the caller does something else.
    """

    def __init__(
        self,
        parts: RolloutParts,
        sampler: ParkingEngine,
        *,
        ahead: int,
        rounds: int,
        updates: int,
        rollout_steps: int,
        background: bool,
    ) -> None:
        self.parts = parts
        self._sampler = sampler
        self._ahead = ahead
        self._rounds = rounds
        self._updates = updates
        self._rollout_steps = rollout_steps
        self.books = Books()
        self._counters: Metrics = {}
        self._parked: dict[str, Any] | None = None
        self._thread = ThreadPoolExecutor(1, "sampling") if background else None
        self._working: Future[None] | None = None
        self._leaving = False

    @property
    def in_flight(self) -> int:
        """See RolloutSource."""
        return self.books.unfinished

    def next(self, draw: int, *, step: int) -> RolloutStep:
        """See RolloutSource: new weights, new requests, rounds until the batch is complete."""
        self._join(self.parts.stop)
        self._take_up()
        self._count()
        held = Snapshot(self.books.copy(), self._sampler.state(), self._counters)
        try:
            return self._next(draw, step)
        except Stopped:
            self._go_back(held)
            raise

    def _next(self, draw: int, step: int) -> RolloutStep:
        parts = self.parts
        clock = parts.clock
        found = RolloutStep(step=step, start=draw, end=draw)
        left = self._rollout_steps - step // self._updates  # from this one on
        admitted = min(self._ahead + 1, left) * parts.prompts_per_step
        with clock.phase("time/rollout_s"):
            parts.delivery.deliver(step)
            self._ask_for(draw + admitted)
        missing = parts.prompts_per_step
        while missing:
            batch = range(found.end, found.end + missing)
            self._ask_for(batch.stop)
            with clock.phase("time/rollout_s"):
                self._wait_for(batch)
            self._score(found, batch)
            missing = still_missing(found, parts)
        choose_groups(found, parts)
        self._keep_surplus(found)
        found.dispatched = self.books.dispatched
        self.books.dispatched = 0
        self._count()
        found.sampler = self._counters
        self._counters = dict.fromkeys(self._counters, 0.0)
        found.delivered = parts.delivery.remember(found.rollouts)
        with clock.phase("time/rollout_s"):
            self._begin()
        return found

    def lend(self, step: int) -> None:
        """See RolloutSource; what is in flight is put aside, not finished."""
        self._join(self.parts.stop)
        if self._parked is None:
            self._count()
            self._parked = self._sampler.state()
            self._sampler.abort(list(self.books.requests))
        self.parts.delivery.deliver(step)

    def close(self) -> None:
        """Stop sampling; what is in flight is lost with the run."""
        self._leaving = True
        if self._thread is not None:
            self._thread.shutdown()

    def save(self, directory: Path) -> None:
        """Write what is in flight, with every token that was sampled."""
        self._join(no_stop)
        self._count()
        books = self.books
        surplus = [one for group in books.scored.values() for one in group]
        scored = RolloutStep(step=0, start=0, end=0)
        size = self.parts.requests.samples
        scored.rollouts = [one for one in surplus if one.sample < size]
        scored.baselines = [one for one in surplus if one.sample >= size]
        content = {
            "end": books.end,
            "draws": sorted({request.draw for request in books.requests.values()}),
            "completions": books.completions,
            "scored": list(written(scored))[1:],
            "dispatched": books.dispatched,
            "counters": self._counters,
            "engine": self._sampler.state() if self._parked is None else self._parked,
        }
        (directory / FILE).write_text(encode_json(content), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            CheckpointError: it is not what was written, or not what this run samples.
        """
        path = directory / FILE
        content = json.loads(path.read_text(encoding="utf-8"))
        requests = {one.id: one for one in self.parts.requests.at(content["draws"])}
        try:
            completions = {
                id: completion_of(stored, self.parts.columns)
                for id, stored in content["completions"].items()
            }
            scored = scored_groups(content["scored"], self.parts.columns)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        unknown = [id for id in completions if id not in requests]
        if unknown:
            raise CheckpointError(
                f"{path} has responses of no draw in {content['draws']}: {unknown[:5]}"
            )
        self.books = Books(content["end"], requests, completions, scored, content["dispatched"])
        self._counters = content["counters"]
        self._parked = content["engine"]

    def _ask_for(self, end: int) -> None:
        """Submit the requests of the draws below `end` that were not asked for."""
        books = self.books
        if end <= books.end:
            return
        requests = self.parts.requests.at(range(books.end, end))
        books.end = end
        books.requests.update((request.id, request) for request in requests)
        books.dispatched += len(requests)
        self._sampler.submit(requests)

    def _wait_for(self, draws: range) -> None:
        """Let windows pass until every response of some draws is complete."""
        wanted = [request.id for request in self.books.of(draws)]
        while any(id not in self.books.completions for id in wanted):
            self._window(self.parts.stop)

    def _begin(self) -> None:
        """Let the sampler go on for as long as the batch trains."""
        if not self.books.missing:
            return
        if self._thread is None:
            self._window(self.parts.stop)
        else:
            self._working = self._thread.submit(self._window, self._asked_to_leave)

    def _asked_to_leave(self) -> bool:
        return self._leaving

    def _window(self, stop: StopAsked) -> None:
        """Sample for exactly so many rounds, or until nothing is missing."""
        sampler = self._sampler
        until = sampler.round + self._rounds
        patience = Patience(stop, self.parts.deadline_s)
        while sampler.round < until and self.books.missing:
            self._poll(patience, until)
        sampler.round = until

    def _poll(self, patience: Patience, until: float, longest_s: float = inf) -> bool:
        """Take in what finishes within a moment.

        Args:
            patience: of the whole wait.
            until: the round at which the poll ends.
            longest_s: of the moment, in seconds.

        Returns:
            Whether the sampler had anything to do before that round.

        Raises:
            DeadlineError: nothing has finished for too long.
            Stopped: a signal asked to stop.
        """
        missing = self.books.missing
        what = f"a sampled response, of {missing[:5]} and {len(missing)} in all"
        seconds = min(patience.look(what), longest_s)
        try:
            finished = self._sampler.poll(seconds, until)
        except DeadlineError:
            return True
        for item in finished:
            self.books.completions[item.request.id] = item.completion
            self.parts.on_finished(item)
        if finished:
            patience.answered()
        return bool(finished)

    def _score(self, found: RolloutStep, draws: range) -> None:
        """Hand over the groups of some draws: those that have scores, then those that get them."""
        books = self.books
        size = self.parts.requests.samples
        for draw in [draw for draw in draws if draw in books.scored]:
            group = books.scored.pop(draw)
            found.rollouts += group[:size]
            found.baselines += group[size:]
            found.end += 1
        wanted = books.of(draws)
        pairs = [(request, books.completions[request.id]) for request in wanted]
        add_scored(found, self.parts, pairs)
        for request in wanted:
            del books.requests[request.id]
            del books.completions[request.id]

    def _keep_surplus(self, found: RolloutStep) -> None:
        """Put aside the groups that a step did not need, with their scores.

        A batch takes at least so many draws as it trains on. So a draw past those of the next
        `ahead` batches might be too old when it is trained on, and is sampled anew.
        """
        end = found.next_draw + self._ahead * self.parts.prompts_per_step
        kept = range(found.next_draw, min(found.end, end))
        surplus = [one for one in (*found.rollouts, *found.baselines) if one.group_id in kept]
        self.books.scored |= by_draw(surplus)
        self.books.end = min(self.books.end, end)
        found.rollouts = [one for one in found.rollouts if one.group_id not in kept]
        found.baselines = [one for one in found.baselines if one.group_id not in kept]

    def _join(self, stop: StopAsked) -> None:
        """Wait for the rounds that pass in the background.

        Raises:
            Stopped: `stop` said so; they go on.
        """
        if self._working is None:
            return
        while not wait([self._working], timeout=LOOK_S).done:
            if stop():
                raise Stopped
        working = self._working
        self._working = None
        working.result()

    def _take_up(self) -> None:
        """Give the sampler back what was put aside."""
        if self._parked is not None:
            self._sampler.restore(self._parked, self.books.requests)
            self._parked = None

    def _go_back(self, held: Snapshot) -> None:
        """Forget what was done since; it is done again after a resume."""
        self._sampler.abort(list(self.books.requests))
        self._sampler.metrics()
        self.books = held.books
        self._counters = held.counters
        self._parked = held.engine

    def _count(self) -> None:
        """Add the sampler's counters."""
        self._counters = added(self._counters, self._sampler.metrics())


def by_draw(rollouts: Iterable[Rollout]) -> dict[int, list[Rollout]]:
    """Rollouts by their draws, each group whole, in ascending order."""
    ordered = sorted(rollouts, key=_place)
    return {draw: list(group) for draw, group in groupby(ordered, key=_draw)}


def _place(rollout: Rollout) -> tuple[int, int]:
    return rollout.group_id, rollout.sample


def _draw(rollout: Rollout) -> int:
    return rollout.group_id


def scored_groups(lines: Iterable[Any], columns: Columns) -> dict[int, list[Rollout]]:
    """Scored groups by their draws, from the lines of `written`."""
    return by_draw(one for line in lines for one in rollouts_of(line, columns))
