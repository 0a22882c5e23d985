"""Rollouts that go on while a batch trains: the bound, the books, and what changes nothing."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pytest

from oxrl.engines.sample import Finished
from oxrl.errors import CheckpointError, DeadlineError, EngineError, InvariantError, Stopped
from oxrl.recipes.features.dynamic_sampling import TeachingGroups
from oxrl.rollouts.continuous import MEASURED, ContinuousRollouts
from oxrl.rollouts.free import FreeRollouts
from oxrl.rollouts.rounds import RoundRollouts
from oxrl.rollouts.schedule import SCHEDULE, RecordedBatch, read_schedule, wrong_lines
from oxrl.rollouts.sync import PromptRequests, RolloutParts, RolloutStep, SyncRollouts
from oxrl.runs.clock import Clock
from oxrl.runs.waiting import no_stop
from oxrl.types import Completion, Prompt, Request, Sampling, Score, Segment

PROMPTS = 3
SAMPLES = 2
# For which a batch trains.
ROUNDS = 7


class Line:
    """Prompts without end."""

    def __len__(self) -> int:
        return 10**6

    def at(self, draw: int, *, seed: int) -> Prompt:
        return Prompt(uid=str(draw), messages=(), token_ids=(5 + draw % 200,))


@dataclass
class Worker:
    """Rows of one process: a token per round and row, the oldest request first."""

    rows: int
    round: int = 0
    waiting: list[str] = field(default_factory=list)
    running: dict[str, list[int]] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)


class MemoryEngine:
    """A ParkingEngine whose rounds take no time, or any time.

    Args:
        workers: that share the requests. haste: of chance, how far a poll gets; None: all the way.
        sleeps: now and then, for a moment that chance decides.
    """

    version = -1

    def __init__(
        self, workers: int = 1, haste: random.Random | None = None, *, sleeps: bool = False
    ) -> None:
        self.workers = [Worker(rows=3) for _ in range(workers)]
        self.requests: dict[str, Request] = {}
        self._haste = haste
        self._sleeps = sleeps

    @property
    def round(self) -> int:
        busy = [worker.round for worker in self.workers if worker.busy]
        return min(busy) if busy else max(worker.round for worker in self.workers)

    @round.setter
    def round(self, value: int) -> None:
        for worker in self.workers:
            worker.round = value

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.id not in self.requests
            self.requests[request.id] = request
            least = min(self.workers, key=lambda one: len(one.waiting) + len(one.running))
            least.waiting.append(request.id)

    def poll(self, deadline_s: float, until: float = inf) -> list[Finished]:
        while True:
            able = [one for one in self.workers if one.busy and one.round < until]
            if not able:
                return []
            worker = able[0] if self._haste is None else self._haste.choice(able)
            if self._sleeps and self._haste is not None:
                time.sleep(self._haste.choice((0, 0, 0, 0, 0.0005)))
            finished = self._work(worker)
            if finished:
                return finished
            if self._haste is not None and self._haste.random() < 0.2:
                raise DeadlineError("it takes long")

    def _work(self, worker: Worker) -> list[Finished]:
        while worker.waiting and len(worker.running) < worker.rows:
            worker.running[worker.waiting.pop(0)] = []
        worker.round += 1
        ended: list[Finished] = []
        for id, versions in list(worker.running.items()):
            versions.append(self.version)
            if len(versions) == length(id):
                del worker.running[id]
                request = self.requests.pop(id)
                ended.append(Finished(request, completion(versions)))
        return ended

    def abort(self, ids: Sequence[str]) -> list[Finished]:
        for id in ids:
            self.requests.pop(id, None)
            for worker in self.workers:
                worker.waiting = [one for one in worker.waiting if one != id]
                worker.running.pop(id, None)
        return []

    def state(self) -> dict[str, Any]:
        workers = [vars(worker) for worker in self.workers]
        return json.loads(json.dumps({"memory": workers}))

    def restore(self, state: Any, requests: Mapping[str, Request]) -> None:
        self.workers = [Worker(**fields) for fields in state["memory"]]
        ids = [id for one in self.workers for id in (*one.running, *one.waiting)]
        self.requests = {id: requests[id] for id in ids}

    def metrics(self) -> dict[str, float]:
        return {}


def length(id: str) -> int:
    """Tokens of a response: few, and now and then many."""
    chance = random.Random(id)
    return chance.choice((1, 2, 3, 4, 17))


def completion(versions: Sequence[int]) -> Completion:
    sampled = Segment(
        origin="policy",
        token_ids=tuple(range(len(versions))),
        logprobs=(-1.0,) * len(versions),
        versions=tuple(versions),
    )
    return Completion(segments=(sampled,), text="", finish_reason="stop")


@dataclass
class Delivered:
    """A Delivery that only says which version it is."""

    sampler: MemoryEngine

    def deliver(self, version: int) -> None:
        self.sampler.version = version

    def remember(self, rollouts: Sequence[Any]) -> dict[str, float]:
        return {}


class CountingScorer:
    """Scores by draw and sample, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def score(self, groups: Sequence[Any], patience: Any = None) -> list[list[Score]]:
        found: list[list[Score]] = []
        for prompt, completions in groups:
            self.asked[prompt.uid] += 1
            chance = random.Random(f"score {prompt.uid}")
            # Now and then no group of a long stretch teaches anything.
            equal = chance.random() < 0.5 or int(prompt.uid) // 20 % 3 == 1
            found.append([Score(value=float(not equal and at)) for at in range(len(completions))])
        return found


def parts_of(
    engine: MemoryEngine, *, rounds: int = 0, stop: Any = no_stop, deadline_s: float = 60
) -> RolloutParts:
    return RolloutParts(
        sampler=engine,  # pyright: ignore
        delivery=Delivered(engine),
        scorer=CountingScorer(),
        requests=PromptRequests(
            Line(),
            samples=SAMPLES,
            sampling=Sampling(max_tokens=20),
            run_seed=1,
            baseline=False,
        ),
        clock=Clock(),
        prompts_per_step=PROMPTS,
        stop=stop,
        deadline_s=deadline_s,
        max_error_rate=1.0,
        choice=TeachingGroups(rounds) if rounds else None,
    )


def source_of(
    parts: RolloutParts, *, ahead: int, updates: int = 1, steps: int, background: bool = False
) -> ContinuousRollouts:
    return ContinuousRollouts(
        parts,
        parts.sampler,  # pyright: ignore
        ahead=ahead,
        rounds=ROUNDS,
        updates=updates,
        rollout_steps=steps,
        background=background,
    )


def told(found: RolloutStep) -> tuple[Any, ...]:
    """What a step handed over, without times."""
    versions = [one.completion.segments[0].versions for one in found.rollouts]
    ids = [(one.group_id, one.sample) for one in found.rollouts]
    return found.start, found.end, found.next_draw, found.groups, found.dispatched, ids, versions


def check_books(source: ContinuousRollouts, engine: MemoryEngine, handed: list[int]) -> None:
    """Every draw is in one state, and the engine has what is asked for and not complete."""
    books = source.books
    assert sorted(books.missing) == sorted(engine.requests)
    states = [
        {request.draw for request in books.requests.values()},
        set(books.scored),
        set(handed),
    ]
    assert sum(map(len, states)) == len(set().union(*states))
    assert set().union(*states) == set(range(books.end))


def free_source(
    parts: RolloutParts, *, ahead: int, updates: int = 1, steps: int, folder: Path
) -> FreeRollouts:
    return FreeRollouts(
        parts,
        parts.sampler,  # pyright: ignore
        ahead=ahead,
        updates=updates,
        rollout_steps=steps,
        background=True,
        path=folder / SCHEDULE,
    )


def played(
    seed: int, *, ahead: int, updates: int, workers: int, rounds: int, steps: int, hurry: bool
) -> list[Any]:
    """A run of a source, its bound and its books looked at after every step."""
    engine = MemoryEngine(workers, random.Random(seed) if hurry else None)
    parts = parts_of(engine, rounds=rounds)
    source = source_of(parts, ahead=ahead, updates=updates, steps=steps)
    found: list[Any] = []
    handed: list[int] = []
    draw = grid = 0
    for at in range(steps):
        step = source.next(draw, step=at * updates)
        draw = step.next_draw
        for one in step.rollouts:
            oldest = min(one.completion.segments[0].versions)
            assert at * updates - oldest <= ahead * updates
        new = sorted({one.group_id for one in step.rollouts})
        assert len(step.rollouts) == SAMPLES * len(new)
        # Those past the ones that are trained on, and too far for a later batch, are asked again.
        again = [one for one in new if one >= step.next_draw]
        assert not again or again[0] >= step.next_draw + ahead * PROMPTS
        new = [one for one in new if one < step.next_draw]
        assert new == list(range(step.start, step.next_draw))
        handed += new
        check_books(source, engine, handed)
        if at < MEASURED:  # round by round
            grid = engine.round
        assert (engine.round - grid) % ROUNDS == 0
        found.append(told(step))
    assert handed == list(range(draw))
    if ahead > 2:  # as far ahead as the most rounds reach: nothing is asked again
        assert max(parts.scorer.asked.values()) == 1  # pyright: ignore
    if not rounds:
        assert source.in_flight == 0
    return found


@pytest.mark.parametrize("part", range(4))
def test_no_token_is_older_than_the_bound_and_every_draw_is_in_one_state(part: int) -> None:
    chance = random.Random(f"bound {part}")
    for seed in range(250):
        kind = {
            "ahead": chance.randint(1, 8),
            "updates": chance.randint(1, 4),
            "workers": chance.randint(1, 3),
            "rounds": chance.choice((0, 3)),
            "steps": chance.randint(2, 9),
        }
        still = played(seed, **kind, hurry=False)
        assert played(seed, **kind, hurry=True) == still, kind


@pytest.mark.parametrize("rounds", [0, 3])
def test_without_a_lag_it_is_the_sequential_source(rounds: int) -> None:
    plain = MemoryEngine()
    ours = MemoryEngine()
    first = (RoundRollouts if rounds else SyncRollouts)(parts_of(plain, rounds=rounds))
    second = source_of(parts_of(ours, rounds=rounds), ahead=0, steps=8)
    one = two = 0
    for step in range(8):
        expected = first.next(one, step=step)
        found = second.next(two, step=step)
        assert told(found) == told(expected)
        assert found.rollouts == expected.rollouts and found.rounds == expected.rounds
        one, two = expected.next_draw, found.next_draw
    assert second.in_flight == 0


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rounds", [0, 3])
def test_a_checkpoint_an_evaluation_and_a_signal_change_nothing(
    rounds: int, background: bool, tmp_path: Path
) -> None:
    steps = 8
    whole = played(0, ahead=3, updates=2, workers=2, rounds=rounds, steps=steps, hurry=False)
    looks = 0
    stops = 0

    def stop() -> bool:
        nonlocal looks
        looks -= 1
        return looks == 0

    def begun() -> tuple[MemoryEngine, ContinuousRollouts]:
        engine = MemoryEngine(2, random.Random("haste"))
        parts = parts_of(engine, rounds=rounds, stop=stop)
        kind = {"ahead": 3, "updates": 2, "steps": steps, "background": background}
        return engine, source_of(parts, **kind)  # pyright: ignore

    engine, source = begun()
    draw = 0
    for at in range(steps):
        found = None
        if at in (0, 2, 5):
            # The signal is seen at the second look; where nobody looks it comes too late.
            looks = 2
            try:
                found = source.next(draw, step=2 * at)
            except Stopped:
                stops += 1
            looks = 0
        if at in (2, 3, 5) and found is None:
            if at != 5:
                source.lend(2 * at)
                assert engine.requests == {} and engine.version == 2 * at
            source.save(tmp_path)
            source.close()
            engine, source = begun()
            source.load(tmp_path)
        found = found or source.next(draw, step=2 * at)
        draw = found.next_draw
        assert told(found) == whole[at], at
    source.close()
    assert stops >= 1


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = source_of(parts_of(MemoryEngine()), ahead=2, steps=5)
    source.next(0, step=0)
    source.save(tmp_path)
    path = tmp_path / "samples.json"
    content = json.loads(path.read_text())
    content["draws"] = content["draws"][1:]
    content["completions"]["999/0"] = next(iter(content["completions"].values()), None) or {
        "segments": [],
        "text": "",
        "finish_reason": "stop",
    }
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="999/0"):
        source_of(parts_of(MemoryEngine()), ahead=2, steps=5).load(tmp_path)


class Forgetful(MemoryEngine):
    """An engine that loses a request when it is restored, or refuses to be."""

    refuses = False

    def restore(self, state: Any, requests: Mapping[str, Request]) -> None:
        if self.refuses:
            raise EngineError("it records other columns")
        super().restore(state, requests)
        self.abort([next(iter(self.requests))])


def saved_in_flight(folder: Path) -> None:
    """The checkpoint of a run that has something in flight after its third batch."""
    source = source_of(parts_of(MemoryEngine()), ahead=2, steps=9)
    draw = 0
    for step in range(3):
        draw = source.next(draw, step=step).next_draw
    assert source.books.missing
    source.save(folder)


def restored(folder: Path, engine: MemoryEngine) -> ContinuousRollouts:
    saved_in_flight(folder)
    source = source_of(parts_of(engine), ahead=2, steps=9)
    source.load(folder)
    return source


def test_what_a_sampler_cannot_go_on_with_is_told_with_its_draws(tmp_path: Path) -> None:
    engine = Forgetful()
    engine.refuses = True
    source = restored(tmp_path, engine)
    told = r"samples\.json holds .* of the draws \[9, .*go on with them: it records other columns"
    with pytest.raises(CheckpointError, match=told):
        source.next(9, step=3)


def test_responses_that_never_come_are_told_with_their_draws(tmp_path: Path) -> None:
    source = restored(tmp_path, Forgetful())
    draw = 9
    with pytest.raises(
        (CheckpointError, InvariantError), match=r"1 responses of the draws \[\d+\]"
    ):
        for step in range(3, 9):
            draw = source.next(draw, step=step).next_draw


def test_a_checkpoint_of_waves_is_refused(tmp_path: Path) -> None:
    (tmp_path / "samples.json").write_text(json.dumps({"batches": [], "completions": {}}))
    with pytest.raises(CheckpointError, match="of an earlier oxRL, which sampled ahead in waves"):
        source_of(parts_of(MemoryEngine()), ahead=2, steps=5).load(tmp_path)


def drawn(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of what a step handed over, the draws and which of them are trained on."""
    start, end, next_draw, groups, _, ids, _ = found
    return start, end, next_draw, groups, ids


def played_by_the_clock(
    seed: int, folder: Path, *, ahead: int, updates: int, workers: int, rounds: int, steps: int
) -> list[Any]:
    """A run of the free source, its bound and its books looked at after every step."""
    chance = random.Random(f"clock {seed}")
    engine = MemoryEngine(workers, chance, sleeps=True)
    parts = parts_of(engine, rounds=rounds)
    source = free_source(parts, ahead=ahead, updates=updates, steps=steps, folder=folder)
    found: list[Any] = []
    handed: list[int] = []
    batches: list[RecordedBatch] = []
    draw = 0
    for at in range(steps):
        step = source.next(draw, step=at * updates)
        for one in step.rollouts:
            versions = one.completion.segments[0].versions
            assert len(versions) == length(f"{one.group_id}/{one.sample}")
            assert list(versions) == sorted(versions)
            assert 0 <= at * updates - versions[0] <= ahead * updates
        batches.append(RecordedBatch(step.step, draw, step.next_draw))
        draw = step.next_draw
        new = sorted({one.group_id for one in step.rollouts if one.group_id < draw})
        assert new == list(range(step.start, draw))
        handed += new
        time.sleep(chance.choice((0, 0, 0.001)))  # while it trains
        source._join(no_stop)  # pyright: ignore
        check_books(source, engine, handed)
        found.append(told(step))
    source.close()
    assert handed == list(range(draw))
    assert list(wrong_lines(read_schedule(folder / SCHEDULE), batches)) == []
    return found


@pytest.mark.parametrize("part", range(3))
def test_by_the_clock_the_same_draws_are_handed_over_under_the_same_bound(
    part: int, tmp_path: Path
) -> None:
    chance = random.Random(f"clock {part}")
    for seed in range(110):
        kind = {
            "ahead": chance.randint(1, 8),
            "updates": chance.randint(1, 4),
            "workers": chance.randint(1, 3),
            "rounds": chance.choice((0, 3)),
            "steps": chance.randint(2, 9),
        }
        logical = played(seed, **kind, hurry=False)
        free = played_by_the_clock(seed, tmp_path, **kind)
        assert [drawn(one) for one in free] == [drawn(one) for one in logical], kind


def test_a_free_run_that_stops_goes_on_with_its_books_and_its_schedule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At a signal that is seen while a batch is waited for, and between two batches."""
    steps = 8
    expected = played(0, ahead=3, updates=2, workers=2, rounds=3, steps=steps, hurry=False)
    stopping = False

    def begun() -> tuple[MemoryEngine, FreeRollouts]:
        engine = MemoryEngine(2, random.Random("haste"), sleeps=True)
        parts = parts_of(engine, rounds=3, stop=lambda: stopping)
        return engine, free_source(parts, ahead=3, updates=2, steps=steps, folder=tmp_path)

    engine, source = begun()
    deliver = Delivered.deliver
    batches: list[RecordedBatch] = []
    draw = 0
    for at in range(steps):
        if at in (1, 4):
            source._join(no_stop)  # pyright: ignore

            def signalled(self: Delivered, version: int) -> None:
                nonlocal stopping
                deliver(self, version)
                stopping = True

            Delivered.deliver = signalled
            with pytest.raises(Stopped):
                source.next(draw, step=2 * at)
            Delivered.deliver = deliver
            stopping = False
        if at in (1, 3, 4):
            checkpoint = tmp_path / f"{at}"
            checkpoint.mkdir()
            source.save(checkpoint)
            # What a kill leaves behind the checkpoint.
            with (tmp_path / SCHEDULE).open("ab") as file:
                file.write(b'{"weights": 9, "wor')
            source.close()
            engine, source = begun()
            source.load(checkpoint)
            assert "the resumed run is another one" in caplog.text
        found = source.next(draw, step=2 * at)
        assert drawn(told(found)) == drawn(expected[at]), at
        batches.append(RecordedBatch(2 * at, draw, found.next_draw))
        draw = found.next_draw
        if at == 5:
            source.lend(2 * at)
            assert engine.requests == {}
    source.close()
    assert list(wrong_lines(read_schedule(tmp_path / SCHEDULE), batches)) == []


def test_a_checkpoint_without_a_place_in_the_schedule_is_refused(tmp_path: Path) -> None:
    source = free_source(parts_of(MemoryEngine()), ahead=2, steps=5, folder=tmp_path)
    source.next(0, step=0)
    source.save(tmp_path)
    source.close()
    for content in ("{}", "[", '{"bytes": 3}'):
        (tmp_path / "schedule.json").write_text(content)
        again = free_source(parts_of(MemoryEngine()), ahead=2, steps=5, folder=tmp_path)
        with pytest.raises(CheckpointError, match=r"schedule.json does not say"):
            again.load(tmp_path)
        again.close()


class StuckEngine(MemoryEngine):
    """One whose rounds never end."""

    def poll(self, deadline_s: float, until: float = inf) -> list[Finished]:
        if until == 0:
            return []
        time.sleep(min(deadline_s, 0.01))
        raise DeadlineError("it takes long")


def test_a_wait_for_responses_ends_and_names_them(tmp_path: Path) -> None:
    for source in (
        source_of(parts_of(StuckEngine(), deadline_s=0.1), ahead=1, steps=3),
        free_source(parts_of(StuckEngine(), deadline_s=0.1), ahead=1, steps=3, folder=tmp_path),
    ):
        with pytest.raises(DeadlineError, match=r"a sampled response, of \['0/0', '0/1'.* in all"):
            source.next(0, step=0)
        source.close()
