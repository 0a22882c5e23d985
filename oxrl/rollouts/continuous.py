"""Sampling that goes on while a batch trains, under a bound on the age of its tokens.

Batch b is admitted once batch b - ahead - 1 is trained. So the oldest token of a row is at most
`ahead` batches older than the update that begins with it, and nothing is ever dropped for its age.

Time is counted in rounds of the sampler, in each of which every active row gets a token. Weights
change and requests go in between two windows of `rounds` rounds each, and a batch trains for
exactly one of them: who is early waits. What is sampled by which weights so depends on nothing that
a clock measures. In one process the window passes before the update, by the same weights, so that
one process and samplers of their own give the same samples.

While the first two batches train nothing is sampled, and they are waited for round by round: how
long they take is what `rounds: auto` goes by. So a run with the number that was found repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from oxrl.engines.sample.parked import ParkingEngine
from oxrl.errors import CheckpointError, DeadlineError, EngineError, InvariantError, Stopped
from oxrl.rollouts.rounds import choose_groups, still_missing
from oxrl.rollouts.sync import RolloutParts, RolloutStep, add_scored
from oxrl.rollouts.waits import ROUNDS, Waits, busy_metrics, lag_metrics, tokens_read_again
from oxrl.rollouts.whole_samples import rollouts_of, written
from oxrl.runs.waiting import LOOK_S, Patience, StopAsked, no_stop
from oxrl.tables.columns import Columns
from oxrl.types import Completion, Metrics, Request, Rollout
from oxrl.usercode.messages import Json, completion_of, encode_json

FILE = "samples.json"
# Batches at the start of a run, while which train nothing is sampled.
MEASURED = 2


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


@dataclass
class Pace:
    """The time of the first batches: seconds of the rounds they wait for, and of their training.

    Where something comes between, such as an evaluation, the training of a batch is over.
    on_found: is told of the rounds that were found, before anything depends on them.
    """

    on_found: Callable[[int], object]
    rounds: int = 0
    sampling_s: float = 0.0
    training_s: list[float] = field(default_factory=list)
    training_since: float | None = None

    @property
    def seen(self) -> Json:
        """Return for a checkpoint how long the first batches took."""
        return {
            "rounds": self.rounds,
            "sampling_s": self.sampling_s,
            "training_s": self.training_s,
        }

    def trained(self) -> None:
        """Note that the batch that was handed over is trained on."""
        if self.training_since is not None:
            self.training_s.append(monotonic() - self.training_since)
        self.training_since = None

    def rounds_of_training(self) -> int:
        """Return for how many rounds a batch trains, at least one; the quicker batch counts."""
        if not self.rounds or not self.training_s:
            return 1
        round_s = max(self.sampling_s / self.rounds, 1e-9)
        return max(1, round(min(self.training_s) / round_s))


class ContinuousRollouts:
    """A RolloutSource whose sampler goes on while a batch trains.

    Args:
        parts: as for `SyncRollouts`; the sampler is a ParkingEngine.
        ahead: batches that a token may be older than the update that begins with it.
        rounds: decode rounds for which a batch trains; a Pace: as the first batches show.
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
        rounds: int | Pace,
        updates: int,
        rollout_steps: int,
        background: bool,
    ) -> None:
        self.parts = parts
        self._sampler = sampler
        self._ahead = ahead
        # Of which nothing is known yet, one at a time.
        self._rounds = 1 if isinstance(rounds, Pace) else rounds
        self._pace = rounds if isinstance(rounds, Pace) else None
        self._updates = updates
        self._rollout_steps = rollout_steps
        self._waits = Waits()
        parts.clock.also(self._waits.counters)
        # Up to which rounds are counted.
        self._counted_round = 0
        # The batch that is about to be handed over, or was.
        self._batch = 0
        self.books = Books()
        self._counters: Metrics = {}
        self._parked: dict[str, Any] | None = None
        # The file that it was read from, until the sampler is known to hold what it says.
        self._read_from: Path | None = None
        self._thread = ThreadPoolExecutor(1, "sampling") if background else None
        self._working: Future[None] | None = None
        self._leaving = False

    @property
    def in_flight(self) -> int:
        """See RolloutSource."""
        return self.books.unfinished

    def next(self, draw: int, *, step: int) -> RolloutStep:
        """See RolloutSource: new weights, new requests, rounds until the batch is complete."""
        with self._waits.of_trainer():
            self._join(self.parts.stop)
        self._batch = step // self._updates
        self._measure(trained=self._batch)
        self._take_up()
        self.books.end = max(self.books.end, draw)
        self._count()
        held = Snapshot(self.books.copy(), self._sampler.state(), self._counters)
        try:
            found = self._next(draw, step)
        except Stopped:
            self._go_back(held)
            raise
        again = tokens_read_again(held.engine, held.books.requests)
        found.sampler |= self._measured(found, again)
        return found

    def _measured(self, found: RolloutStep, again: int) -> Metrics:
        """Measure what a sequential run has nothing of."""
        if not self._ahead:
            return {}
        busy = busy_metrics(found.sampler, self.parts.slots)
        lags = lag_metrics(found.rollouts, found.groups, version=found.step)
        return busy | lags | {"rollout/tokens_read_again": float(again)}

    def _next(self, draw: int, step: int) -> RolloutStep:
        parts = self.parts
        clock = parts.clock
        found = RolloutStep(step=step, start=draw, end=draw)
        left = self._rollout_steps - self._batch  # from this one on
        admitted = min(self._ahead + 1, left) * parts.prompts_per_step
        with clock.phase("time/rollout_s"):
            parts.delivery.deliver(step)
            self._ask_for(draw + admitted)
        missing = parts.prompts_per_step
        while missing:
            batch = range(found.end, found.end + missing)
            self._ask_for(batch.stop)
            with clock.phase("time/rollout_s"), self._waits.of_trainer():
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
        if self._pace is not None:
            self._pace.training_since = monotonic()
        self._read_from = None
        return found

    def lend(self, step: int) -> None:
        """See RolloutSource; what is in flight is put aside, not finished."""
        self._join(self.parts.stop)
        if self._pace is not None:
            self._pace.trained()
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
        self._measure(trained=self._batch + 1)
        if self._parked is None:  # else an evaluation has the sampler, which is not counted
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
        if self._pace is not None:  # times of this machine, as long as they are needed
            content["pace"] = self._pace.seen
        (directory / FILE).write_text(encode_json(content), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            CheckpointError: it is not what was written, or not what this run samples.
        """
        path = directory / FILE
        content = json.loads(path.read_text(encoding="utf-8"))
        if "engine" not in content:
            raise CheckpointError(
                f"{path} is of an earlier oxRL, which sampled ahead in waves: go on with that one, "
                "or start a new run"
            )
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
        if self._pace is not None and "pace" in content:
            self._pace = replace(self._pace, **content["pace"])
        self._parked = content["engine"]
        self._read_from = path

    def _measure(self, *, trained: int) -> None:
        """Note that a batch is trained on; find its rounds out once so many batches are."""
        pace = self._pace
        if pace is None:
            return
        pace.trained()
        if trained >= MEASURED:
            self._rounds = pace.rounds_of_training()
            self._pace = None
            pace.on_found(self._rounds)

    @property
    def _window_rounds(self) -> int:
        """Rounds that are waited for at a time: as many as a batch trains for, or one."""
        return 1 if self._batch < MEASURED else self._rounds

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
        before = self._sampler.round
        begun = monotonic()
        while any(id not in self.books.completions for id in wanted):
            self._window(self.parts.stop)
        if self._pace is not None:
            self._pace.rounds += self._sampler.round - before
            self._pace.sampling_s += monotonic() - begun

    def _begin(self) -> None:
        """Let the sampler go on for as long as the batch trains."""
        if self._batch < MEASURED or not self.books.missing:
            return
        if self._thread is None:
            self._window(self.parts.stop)
        else:
            self._working = self._thread.submit(self._window, self._asked_to_leave)

    def _asked_to_leave(self) -> bool:
        return self._leaving

    def _window(self, stop: StopAsked) -> None:
        """Sample for exactly so many rounds, or until nothing is missing."""
        with self._waits.sampling():
            self._pass_rounds(stop)

    def _pass_rounds(self, stop: StopAsked) -> None:
        sampler = self._sampler
        until = sampler.round + self._window_rounds
        patience = Patience(stop, self.parts.deadline_s)
        while sampler.round < until and (missing := self.books.missing):
            if not self._poll(patience, until) and sampler.round < until:
                raise self._lost(missing)
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
        """Give the sampler back what was put aside.

        Raises:
            CheckpointError: it was read from a checkpoint, and the sampler cannot go on with it.
        """
        if self._parked is None:
            return
        try:
            self._sampler.restore(self._parked, self.books.requests)
        except EngineError as error:
            if self._read_from is None:
                raise
            draws = sorted({request.draw for request in self.books.requests.values()})
            raise CheckpointError(
                f"{self._read_from} holds responses of the draws {draws} that were being sampled, "
                f"and the sampler cannot go on with them: {error}"
            ) from error
        self._parked = None
        self._counted_round = self._sampler.round

    def _lost(self, missing: list[str]) -> Exception:
        """The error of a sampler that has nothing more to do while responses are missing."""
        draws = sorted({self.books.requests[id].draw for id in missing})
        lost = f"{len(missing)} responses of the draws {draws} that it is not sampling"
        if self._read_from is None:
            return InvariantError(f"the sampler has nothing to do, and there are {lost}")
        return CheckpointError(f"{self._read_from}: the sampler was restored, and there are {lost}")

    def _go_back(self, held: Snapshot) -> None:
        """Forget what was done since; it is done again after a resume."""
        self._sampler.abort(list(self.books.requests))
        self._sampler.metrics()
        self.books = held.books
        self._counters = held.counters
        self._parked = held.engine

    def _count(self) -> None:
        """Add the sampler's counters."""
        round = self._sampler.round
        passed = {ROUNDS: float(round - self._counted_round)}
        self._counters = added(self._counters, passed | self._sampler.metrics())
        self._counted_round = round


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
