"""Sources of rollouts bring the weights that they sample with: before which request, what of that
is told, and what signals, evaluations, resumes and failures leave of it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.errors import Stopped, WeightSyncError
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.recipes.scored_answers import Evaluation, ScoredSampler
from oxrl.rollouts.continuous import ContinuousRollouts
from oxrl.rollouts.rounds import RoundRollouts
from oxrl.rollouts.sync import (
    PromptRequests,
    RolloutParts,
    SyncRollouts,
    make_requests,
)
from oxrl.rollouts.whole_samples import KeepingSource, StoredRollouts
from oxrl.runs.clock import Clock
from oxrl.types import Group, Metrics, Prompt, Request, Rollouts, Sampling, Score, Scores

ROOT = Path(__file__).parents[2]
SAMPLING = Sampling(max_tokens=3, stop_token_ids=())


@dataclass
class Notes:
    """What happened, in order; a signal comes at note number `signal`."""

    lines: list[str] = field(default_factory=list)
    signal: int = -1
    asked: bool = False

    def add(self, line: str) -> None:
        self.asked |= len(self.lines) == self.signal
        self.lines.append(line)

    def wait(self) -> None:
        """What waits for others notices a signal."""
        if self.asked:
            raise Stopped

    def taken(self) -> list[str]:
        """The lines since the last call."""
        lines = self.lines
        self.lines = []
        return lines


class Noting(LocalSampler):
    """Notes how much is asked of which weights."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(load_policy("builtin:tiny"), load_tokenizer("builtin:tiny"))
        self.notes = notes

    def submit(self, requests: Sequence[Request]) -> None:
        self.notes.add(f"ask {len(requests)} of {self.version}")
        super().submit(requests)


class Moving:
    """A Delivery of weights that differ with every version."""

    def __init__(self, sampler: Noting) -> None:
        self.sampler = sampler
        self.first = {name: own.clone() for name, own in sampler.model.named_parameters()}
        self.lost: set[int] = set()
        self.sent = 0

    def deliver(self, version: int) -> None:
        self.sampler.notes.add(f"deliver {version}")
        self.sampler.notes.wait()
        if version in self.lost:
            raise WeightSyncError(f"version {version} is lost")
        weights = [(name, own * (1 + version)) for name, own in self.first.items()]
        self.sampler.update_weights([weights], version)
        self.sent += 1

    def remember(self, rollouts: Rollouts) -> Metrics:
        groups = sorted({rollout.group_id for rollout in rollouts})
        self.sampler.notes.add(f"remember {groups[0]}-{groups[-1]}")
        sent = self.sent
        self.sent = 0
        return {"sync/sent": float(sent)}


class Lengths:
    """A GroupScorer that notes of which weights the scored responses are."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def score(self, groups: Sequence[Group], patience: object = None) -> Scores:
        responses = [response for _, group in groups for response in group]
        if responses:
            versions = {version for each in responses for version in each.segments[0].versions}
            self.notes.add(f"score {len(responses)} of {sorted(versions)}")
            self.notes.wait()
        return [[Score(value=float(len(each.text))) for each in group] for _, group in groups]


class Prompts:
    """As many prompts as are asked for."""

    def __len__(self) -> int:
        return 100

    def at(self, draw: int, *, seed: int) -> Prompt:
        return Prompt(uid=str(draw), messages=(), token_ids=(5 + draw, 7, 9))


class OneMore:
    """A GroupChoice that wants a prompt more after the first round, and trains on the last ones."""

    rounds = 2

    def missing(self, rollouts: Rollouts, *, wanted: int, rounds: int) -> int:
        return int(rounds == 1)

    def groups(self, rollouts: Rollouts, *, wanted: int) -> tuple[int, ...]:
        return tuple(sorted({rollout.group_id for rollout in rollouts})[-wanted:])


def parts_of(notes: Notes, choice: OneMore | None = None) -> RolloutParts:
    """Two prompts a step, two responses to each."""
    sampler = Noting(notes)
    requests = PromptRequests(Prompts(), samples=2, sampling=SAMPLING, run_seed=1, baseline=False)
    return RolloutParts(
        sampler=sampler,
        delivery=Moving(sampler),
        scorer=Lengths(notes),
        requests=requests,
        clock=Clock(),
        prompts_per_step=2,
        stop=lambda: notes.asked,
        deadline_s=60,
        max_error_rate=0.5,
        choice=choice,
    )


def steps(notes: Notes) -> SyncRollouts:
    return SyncRollouts(parts_of(notes))


def rounds(notes: Notes) -> RoundRollouts:
    return RoundRollouts(parts_of(notes, OneMore()))


def ahead(
    notes: Notes, *, batches: int = 1, background: bool = False, choice: OneMore | None = None
) -> ContinuousRollouts:
    parts = parts_of(notes, choice)
    return ContinuousRollouts(
        parts,
        parts.sampler,  # pyright: ignore[reportArgumentType]
        ahead=batches,
        rounds=2,
        updates=1,
        rollout_steps=6,
        background=background,
    )


SOURCES: dict[str, Any] = {
    "steps": steps,
    "rounds": rounds,
    "ahead": ahead,
    "further ahead": partial(ahead, batches=2),
    "ahead in rounds": partial(ahead, choice=OneMore()),
    "in the background": partial(ahead, batches=2, background=True),
}
# What every question to a source leads to. Of two blocks each step is one of what was sampled by
# the weights at the start of the block before.
EXPECTED = {
    "steps": [
        ["deliver 0", "ask 4 of 0", "score 4 of [0]", "remember 0-1"],
        ["deliver 1", "ask 4 of 1", "score 4 of [1]", "remember 2-3"],
    ],
    "rounds": [
        "deliver 0|ask 4 of 0|score 4 of [0]|ask 2 of 0|score 2 of [0]|remember 0-2".split("|"),
        "deliver 1|ask 4 of 1|score 4 of [1]|ask 2 of 1|score 2 of [1]|remember 3-5".split("|"),
    ],
    "ahead": [
        ["deliver 0", "ask 8 of 0", "score 4 of [0]", "remember 0-1"],
        # It was complete; while the first two batches train nothing is sampled.
        ["deliver 1", "ask 4 of 1", "score 4 of [0]", "remember 2-3"],
        ["deliver 2", "ask 4 of 2", "score 4 of [2]", "remember 4-5"],
        ["deliver 3", "ask 4 of 3", "score 4 of [2]", "remember 6-7"],
        # Two rounds while a batch trains, and the token of an admission before them.
        ["deliver 4", "ask 4 of 4", "score 4 of [3]", "remember 8-9"],
        ["deliver 5", "score 4 of [4]", "remember 10-11"],
    ],
    "further ahead": [
        ["deliver 0", "ask 12 of 0", "score 4 of [0]", "remember 0-1"],
        ["deliver 1", "ask 4 of 1", "score 4 of [0]", "remember 2-3"],
        ["deliver 2", "ask 4 of 2", "score 4 of [0]", "remember 4-5"],
        ["deliver 3", "ask 4 of 3", "score 4 of [2]", "remember 6-7"],
        ["deliver 4", "score 4 of [2]", "remember 8-9"],
        ["deliver 5", "score 4 of [3]", "remember 10-11"],
    ],
    "ahead in rounds": [
        ["deliver 0", "ask 8 of 0", "score 4 of [0]", "score 2 of [0]", "remember 0-2"],
        # Of the four responses that a batch asks for first, two were asked for before.
        ["deliver 1", "ask 6 of 1", "score 4 of [0, 1]", "score 2 of [1]", "remember 3-5"],
        ["deliver 2", "ask 6 of 2", "score 4 of [1, 2]", "score 2 of [2]", "remember 6-8"],
    ],
}
EXPECTED["in the background"] = EXPECTED["further ahead"]


@pytest.mark.parametrize("kind", SOURCES)
def test_weights_are_delivered_before_the_first_request_and_remembered_last(kind: str) -> None:
    notes = Notes()
    source = SOURCES[kind](notes)
    draw = 0
    for step, expected in enumerate(EXPECTED[kind]):
        found = source.next(draw, step=step)
        draw = found.next_draw
        happened = notes.taken()
        assert happened == expected, step
        delivered = [line for line in happened if line.startswith("deliver")]
        assert found.delivered == {"sync/sent": len(delivered)}
    source.close()


def test_a_source_whose_samples_are_kept_delivers_as_it_does_without_that(tmp_path: Path) -> None:
    notes = Notes()
    source = KeepingSource(steps(notes), tmp_path)
    assert source.next(0, step=0).delivered == {"sync/sent": 1}
    source.lend(1)
    assert notes.taken() == [*EXPECTED["steps"][0], "deliver 1"]


def test_stored_samples_need_no_weights_but_an_evaluation_of_theirs_does(tmp_path: Path) -> None:
    drawn = KeepingSource(steps(Notes()), tmp_path)
    first, second = (drawn.next(2 * step, step=step) for step in (0, 1))
    notes = Notes()
    source = StoredRollouts(tmp_path, parts_of(notes))
    found = source.next(0, step=0)
    assert found.rollouts == first.rollouts and found.delivered == {"sync/sent": 0}
    assert notes.taken() == ["remember 0-1"]
    source.lend(1)
    assert notes.taken() == ["deliver 1"]
    # What the evaluation's delivery cost is in the line of the step after it.
    found = source.next(2, step=1)
    assert found.rollouts == second.rollouts and found.delivered == {"sync/sent": 1}
    assert notes.taken() == ["remember 2-3"]


@pytest.mark.parametrize("kind", SOURCES)
def test_what_is_lent_is_idle_with_the_newest_weights_and_changes_no_sample(kind: str) -> None:
    undisturbed, disturbed = (SOURCES[kind](Notes()) for _ in range(2))
    draw = 0
    for step in range(4):
        expected = undisturbed.next(draw, step=step)
        found = disturbed.next(draw, step=step)
        assert found.rollouts == expected.rollouts, step
        assert (found.groups, found.dispatched) == (expected.groups, expected.dispatched)
        if kind != "in the background":  # there, work is counted where it is noticed to be done
            counters = {name: n for name, n in found.sampler.items() if "throughput" not in name}
            assert counters.items() <= expected.sampler.items()
        draw = found.next_draw

        disturbed.lend(step + 1)
        sampler = disturbed.parts.sampler
        assert sampler.version == step + 1
        prompt = Prompt(uid="held out", messages=(), token_ids=(5, 8))
        requests = make_requests([(step, prompt)], samples=1, sampling=SAMPLING, run_seed=9)
        [answer] = generate(sampler, requests, deadline_s=60)
        assert answer.segments[0].versions == (step + 1,) * 3
        sampler.metrics()
    undisturbed.close()
    disturbed.close()


def test_an_evaluation_is_of_the_weights_of_its_step() -> None:
    notes = Notes()
    source = ahead(notes)
    answers = ScoredSampler(
        sampler=source.parts.sampler,
        scorer=Lengths(notes),
        sampling=SAMPLING,
        samples=1,
        seed=3,
        deadline_s=60,
        stop=source.parts.stop,
    )
    prompts: Any = SimpleNamespace(in_order=lambda: [Prompts().at(20, seed=0)])
    session: Any = SimpleNamespace(clock=Clock(), work=lambda *given, **named: None)
    source.next(0, step=0)
    notes.taken()
    Evaluation(prompts, answers, source).measure(session, 1)
    assert notes.taken() == ["deliver 1", "ask 1 of 1", "score 1 of [1]"]


@pytest.mark.parametrize("signal", range(16))
@pytest.mark.parametrize("kind", ["steps", "rounds", "ahead", "further ahead", "ahead in rounds"])
def test_after_a_signal_anywhere_the_same_question_has_the_same_answer(
    kind: str, signal: int
) -> None:
    """In a delivery, while a round is sampled, and while it is scored."""
    notes = Notes()
    whole = SOURCES[kind](Notes())
    stopped = SOURCES[kind](notes)
    notes.signal = signal
    draw = 0
    for step in range(4):
        expected = whole.next(draw, step=step)
        before = stopped.in_flight
        try:
            found = stopped.next(draw, step=step)
        except Stopped:
            assert stopped.in_flight == before
            notes.signal = -1
            notes.asked = False
            found = stopped.next(draw, step=step)
        assert found.rollouts == expected.rollouts, step
        told = (found.start, found.end, found.groups, found.next_draw, found.dispatched)
        assert told == (
            expected.start,
            expected.end,
            expected.groups,
            expected.next_draw,
            expected.dispatched,
        )
        assert stopped.in_flight == whole.in_flight
        draw = found.next_draw


def test_a_resumed_source_delivers_where_its_run_would_have(tmp_path: Path) -> None:
    whole = ahead(Notes(), batches=2)
    whole.next(0, step=0)
    whole.save(tmp_path)
    notes = Notes()
    restored = ahead(notes, batches=2)
    restored.load(tmp_path)
    for step in (1, 2, 3, 4):
        assert restored.next(2 * step, step=step).rollouts == (
            whole.next(2 * step, step=step).rollouts
        )
        # What was in flight comes back before: nothing is.
        happened = [line for line in notes.taken() if line != "ask 0 of 0"]
        assert happened == EXPECTED["further ahead"][step]


@pytest.mark.parametrize("kind", ["steps", "rounds", "ahead"])
def test_a_resumed_source_with_nothing_in_flight_delivers_first(kind: str) -> None:
    notes = Notes()
    SOURCES[kind](notes).next(4, step=2)
    asked = 8 if kind == "ahead" else 4
    assert notes.taken()[:2] == ["deliver 2", f"ask {asked} of 2"]


@pytest.mark.parametrize("kind, lost, in_flight", [("steps", 1, 0), ("further ahead", 2, 8)])
def test_nothing_is_asked_of_weights_that_did_not_arrive(
    kind: str, lost: int, in_flight: int
) -> None:
    notes = Notes()
    source = SOURCES[kind](notes)
    for step in range(lost):
        source.next(2 * step, step=step)
    source.parts.delivery.lost = {lost}
    notes.taken()
    with pytest.raises(WeightSyncError, match=f"version {lost} is lost"):
        source.next(2 * lost, step=lost)
    assert notes.taken()[-1] == f"deliver {lost}"
    # What was in flight for the steps after this one still is.
    assert source.in_flight == in_flight


def test_a_closed_source_asks_for_nothing_more() -> None:
    notes = Notes()
    source = ahead(notes, batches=2, background=True)
    for step in range(3):
        source.next(2 * step, step=step)
    notes.taken()
    source.close()
    assert notes.taken() == [] and source.in_flight == 8


def deliveries(path: Path) -> list[str]:
    """The functions of a file that call `deliver`, by their whole names."""

    def inside(node: ast.AST, name: str) -> list[str]:
        found: list[str] = []
        for child in ast.iter_child_nodes(node):
            own = name
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                own = f"{name}.{child.name}"
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                found += [name] * (child.func.attr == "deliver")
            found += inside(child, own)
        return found

    relative = path.relative_to(ROOT).with_suffix("").as_posix()
    return inside(ast.parse(path.read_text(encoding="utf-8")), relative)


def test_sources_and_evaluations_of_a_model_alone_deliver_weights() -> None:
    files = [*(ROOT / "oxrl").rglob("*.py"), *(ROOT / "packages").rglob("*.py")]
    found = {name for path in files for name in deliveries(path)}
    assert found == {
        "oxrl/rollouts/sync.SyncRollouts.next",
        "oxrl/rollouts/sync.SyncRollouts.lend",
        "oxrl/rollouts/continuous.ContinuousRollouts._next",
        "oxrl/rollouts/continuous.ContinuousRollouts.lend",
        "oxrl/rollouts/replayed_schedule.ReplayedSchedule._sample_again",
        # Evaluations without a source: of a model that is given, and of one that rows teach.
        "oxrl/assembly/sampler_processes.proved_sampler",
        "oxrl/assembly/answered.build_generated.evaluate",
        # The transport of a delivery, which is below it.
        "oxrl/engines/delivery/sync.WeightSync._load",
    }
