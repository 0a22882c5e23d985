"""Rewards while other responses are sampled: sooner, and otherwise as if nothing had changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from oxrl.engines.sample import Finished
from oxrl.errors import DeadlineError, RewardError, Stopped
from oxrl.rollouts.overlapped_scoring import OverlappedScorer
from oxrl.runs.waiting import Patience, no_stop
from oxrl.types import Completion, Group, Metrics, Prompt, Request, Sampling, Score

Open = Callable[..., OverlappedScorer]


class Recorded:
    """A scorer that scores by the text, and notes which groups it got at once."""

    def __init__(self, act: Callable[[Sequence[Group], Patience], None] | None = None) -> None:
        self.calls: list[list[str]] = []
        self.called = threading.Event()
        self._act = act
        self._scored = 0

    def counters(self) -> Metrics:
        found = {"scored": float(self._scored)}
        self._scored = 0
        return found

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> list[list[Score]]:
        self.calls.append([prompt.uid for prompt, _ in groups])
        self.called.set()
        self._scored += len(groups)
        if self._act is not None:
            assert patience is not None
            self._act(groups, patience)
        return [[Score(value=float(c.text)) for c in group] for _, group in groups]


@pytest.fixture
def open_scorer() -> Iterator[Open]:
    opened: list[OverlappedScorer] = []

    def open_(
        scorer: Recorded, *, stop: Callable[[], object] = no_stop, deadline_s: float = 60.0
    ) -> OverlappedScorer:
        opened.append(
            OverlappedScorer(
                scorer,
                scorer.counters,
                samples=2,
                prompts=4,
                stop=stop,
                deadline_s=deadline_s,
            )
        )
        return opened[-1]

    yield open_
    for scorer in opened:
        scorer.close()


def finished(draw: int, sample: int) -> Finished:
    prompt = Prompt(uid=str(draw), messages=(), token_ids=(1,))
    request = Request(
        id=f"{draw}/{sample}",
        prompt=prompt,
        draw=draw,
        sample=sample,
        sampling=Sampling(),
        seed=0,
    )
    text = str(10 * draw + sample)
    return Finished(request, Completion(segments=(), text=text, finish_reason="stop"))


def groups_of(items: Sequence[Finished], size: int = 2) -> list[Group]:
    found: list[Group] = []
    for start in range(0, len(items), size):
        part = items[start : start + size]
        found.append((part[0].request.prompt, [item.completion for item in part]))
    return found


def values(scores: Sequence[Sequence[Score]]) -> list[list[float | None]]:
    return [[score.value for score in group] for group in scores]


ITEMS = [finished(draw, sample) for draw in range(4) for sample in range(2)]
EXPECTED = [[10.0 * draw, 10.0 * draw + 1] for draw in range(4)]


def test_a_group_is_scored_as_soon_as_its_last_sample_is_there(open_scorer: Open) -> None:
    recorded = Recorded()
    scorer = open_scorer(recorded)
    scorer.offer(ITEMS[1])
    assert not recorded.called.wait(0.1)
    scorer.offer(ITEMS[0])
    assert recorded.called.wait(10)
    assert recorded.calls == [["0"]]


@pytest.mark.parametrize("order", [range(8), reversed(range(8)), (3, 0, 6, 2, 7, 5, 1, 4)])
def test_scores_come_in_the_order_asked_whoever_finished_first(
    open_scorer: Open, order: Sequence[int]
) -> None:
    recorded = Recorded()
    scorer = open_scorer(recorded)
    for place in order:
        scorer.offer(ITEMS[place])
    assert values(scorer.score(groups_of(ITEMS))) == EXPECTED
    # Each group once, however they came together.
    assert sorted(uid for call in recorded.calls for uid in call) == ["0", "1", "2", "3"]
    # What was taken is forgotten: asked again, it is scored again.
    assert values(scorer.score(groups_of(ITEMS))) == EXPECTED
    assert sum(map(len, recorded.calls)) == 8


def test_what_was_never_offered_is_scored_when_it_is_asked_for(open_scorer: Open) -> None:
    scorer = open_scorer(Recorded())
    scorer.offer(ITEMS[2])
    scorer.offer(ITEMS[3])
    assert values(scorer.score(groups_of(ITEMS))) == EXPECTED
    assert scorer.score([]) == []


def test_a_baseline_is_a_group_of_its_own(open_scorer: Open) -> None:
    recorded = Recorded()
    scorer = open_scorer(recorded)
    greedy = finished(0, 2)
    scorer.offer(greedy)
    assert recorded.called.wait(10)
    assert values(scorer.score(groups_of([greedy], size=1))) == [[2.0]]
    assert recorded.calls == [["0"]]


def test_groups_that_wait_are_scored_together(open_scorer: Open) -> None:
    release = threading.Event()
    recorded = Recorded(lambda groups, patience: release.wait(10))
    scorer = open_scorer(recorded)
    scorer.offer(ITEMS[0])
    scorer.offer(ITEMS[1])
    assert recorded.called.wait(10)
    for item in ITEMS[2:]:
        scorer.offer(item)
    release.set()
    assert values(scorer.score(groups_of(ITEMS))) == EXPECTED
    assert recorded.calls == [["0"], ["1", "2", "3"]]


def test_an_error_of_a_reward_is_raised_where_its_scores_are_asked_for(open_scorer: Open) -> None:
    def fail(groups: Sequence[Group], patience: Patience) -> None:
        if groups[0][0].uid == "0":
            raise RewardError("broken")

    recorded = Recorded(fail)
    scorer = open_scorer(recorded)
    scorer.offer(ITEMS[0])
    scorer.offer(ITEMS[1])
    assert recorded.called.wait(10)
    for item in ITEMS[2:]:
        scorer.offer(item)
    assert values(scorer.score(groups_of(ITEMS[2:]))) == EXPECTED[1:]
    with pytest.raises(RewardError, match="broken"):
        scorer.score(groups_of(ITEMS[:2]))


def hang(groups: Sequence[Group], patience: Patience) -> None:
    while True:
        patience.look("a score")
        time.sleep(0.01)


def test_a_stop_is_seen_while_scores_are_waited_for(open_scorer: Open) -> None:
    stop = threading.Event()
    scorer = open_scorer(Recorded(hang), stop=stop.is_set)
    scorer.offer(ITEMS[0])
    scorer.offer(ITEMS[1])
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(Stopped):
        scorer.score(groups_of(ITEMS[:2]))


def test_the_deadline_is_that_of_the_next_score(open_scorer: Open) -> None:
    scorer = open_scorer(Recorded(hang), deadline_s=0.3)
    scorer.offer(ITEMS[0])
    scorer.offer(ITEMS[1])
    with pytest.raises(DeadlineError, match=r"run\.deadlines\.rollout=0\.3"):
        scorer.score(groups_of(ITEMS[:2]))


def test_closing_gives_up_what_is_being_scored() -> None:
    recorded = Recorded(hang)
    counters = recorded.counters
    scorer = OverlappedScorer(
        recorded, counters, samples=2, prompts=4, stop=no_stop, deadline_s=600
    )
    scorer.offer(ITEMS[0])
    scorer.offer(ITEMS[1])
    assert recorded.called.wait(10)
    began = time.monotonic()
    scorer.close()
    assert time.monotonic() - began < 5


def test_what_scoring_took_is_counted_where_the_scores_are_asked_for(open_scorer: Open) -> None:
    """Also of the next step, whose groups are scored while this one trains."""
    free = threading.Event()

    def wait_once(groups: Sequence[Group], patience: Patience) -> None:
        free.wait(30)

    recorded = Recorded(wait_once)
    scorer = open_scorer(recorded)
    assert scorer.counters() == {"scored": 0.0}
    both = [finished(draw, sample) for draw in range(8) for sample in range(2)]
    for item in both:
        scorer.offer(item)
    free.set()
    scorer.score(groups_of(both[:8]))
    deadline = time.monotonic() + 30
    while sum(map(len, recorded.calls)) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert scorer.counters() == {"scored": 4.0}
    assert not any({"3", "4"} <= set(call) for call in recorded.calls)
    scorer.score(groups_of(both[8:]))
    assert scorer.counters() == {"scored": 4.0}
    assert scorer.counters() == {"scored": 0.0}
