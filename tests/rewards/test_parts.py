"""A reward of several parts: what its scores are, whatever becomes of a part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from oxrl.errors import RewardDefinitionError, RewardError, Stopped
from oxrl.rewards.parts import Part, PartsPool, combined
from oxrl.rewards.pool_choice import reward_pool
from oxrl.rewards.pools import InlinePool
from oxrl.rewards.workers import RewardPool
from oxrl.runs.threads import in_threads
from oxrl.runs.waiting import Patience
from oxrl.types import Completion, Group, Metrics, Prompt, Score, Scores

REWARDS = """
import os, time
from pathlib import Path
from oxrl.types import Score

def length(prompt, completion):
    return float(len(completion))

def fussy(prompt, completion):
    if "x" in completion:
        raise ValueError("an x")
    if "n" in completion:
        return float("nan")
    if "s" in completion:
        time.sleep(60)
    if "d" in completion:
        os._exit(3)
    return 1.0

def made(prompt, completions):
    return [Score(value=2.0, parts={"inner": 0.5}, reason="well") for _ in completions]

def meeting(prompt, completion):
    met = Path(__file__).parent / "met"
    met.mkdir(exist_ok=True)
    (met / str(os.getpid())).touch()
    last = time.monotonic() + 60 * (prompt.uid != "dry-call")
    while len(list(met.iterdir())) < 3 and time.monotonic() < last:
        time.sleep(0.01)
    return float(len(list(met.iterdir())) == 3)

def wrong(prompt, completion):
    return "text"

def endless(prompt, completion):
    if prompt.uid != "dry-call":
        time.sleep(600)
    return 1.0
"""

Open = Callable[..., PartsPool]


@pytest.fixture
def open_parts(tmp_path: Path) -> Iterator[Open]:
    """`open_parts(a=("length", 2.0), ...)`: part -> (function, weight[, optional])."""
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    pools: list[PartsPool] = []

    def open_(timeout_s: float = 20.0, **parts: tuple[Any, ...]) -> PartsPool:
        found: dict[str, Part] = {}
        for name, (function, weight, *optional) in parts.items():
            place = function if function in ("math", "exact") else f"{path}:{function}"
            field = f"reward.parts.{name}"
            pool = RewardPool(place, timeout_s=timeout_s, field=field)
            found[name] = Part(
                pool=pool, weight=weight, optional=optional[0] if optional else False
            )
        pools.append(PartsPool(found))
        return pools[-1]

    yield open_
    for pool in pools:
        pool.close()


def group(*texts: str, uid: str = "p", answer: object = "3") -> tuple[Prompt, list[Completion]]:
    messages = ({"role": "user", "content": "q"},)
    prompt = Prompt(uid=uid, messages=messages, token_ids=(1,), answer=answer)
    return prompt, [Completion(segments=(), text=text, finish_reason="stop") for text in texts]


def only(scores: Sequence[Sequence[Score]]) -> list[Score]:
    return [score for group_scores in scores for score in group_scores]


def test_a_score_is_the_weighted_sum_of_its_parts(open_parts: Open) -> None:
    pool = open_parts(long=("length", 0.5), right=("exact", 2.0), made=("made", -1.0))
    found = pool.score([group("3", "four"), group(), group("33")])
    assert [[score.value for score in scores] for scores in found] == [[0.5, 0.0], [], [-1.0]]
    first = found[0][0]
    assert first.parts == {"long": 1.0, "right": 1.0, "made": 2.0, "made.inner": 0.5}
    assert first.statuses == {"long": "ok", "right": "ok", "made": "ok"}
    assert first.reason == "made: well"


def test_a_failed_part_fails_the_row_and_no_other_row(open_parts: Open) -> None:
    pool = open_parts(1.0, long=("length", 1.0), fussy=("fussy", 1.0))
    scores = only(pool.score([group("ok", "x", "n", "s", "d", "oo")]))
    assert [score.value for score in scores] == [3.0, None, None, None, None, 3.0]
    statuses = [score.status for score in scores]
    assert statuses == ["ok", "error", "invalid", "timeout", "error", "ok"]
    assert [score.statuses["fussy"] for score in scores] == statuses
    assert {score.statuses["long"] for score in scores} == {"ok"}
    assert scores[1].parts == {"long": 1.0}
    assert scores[1].reason.startswith("fussy: ") and "an x" in scores[1].reason
    assert "reward.parts.fussy.timeout_s=1" in scores[3].reason


def test_an_optional_part_that_fails_is_left_out(open_parts: Open) -> None:
    pool = open_parts(long=("length", 1.0), fussy=("fussy", 10.0, True))
    scores = only(pool.score([group("ok", "x")]))
    assert [score.value for score in scores] == [12.0, 1.0]
    assert scores[1].status == "ok"
    assert scores[1].statuses == {"long": "ok", "fussy": "error"}
    assert "an x" in scores[1].reason


def test_a_part_that_failed_once_may_be_left_out_of_its_group_and_of_no_other(
    open_parts: Open,
) -> None:
    pool = open_parts(long=("length", 1.0), fussy=("fussy", 10.0, "group"), made=("made", -1.0))
    one, other = pool.score([group("ok", "x", "four"), group("ok", "five")])
    # Of the first group nobody has the 10 of the part: the baseline is that of the lengths.
    assert [score.value for score in one] == [2.0 - 2.0, 1.0 - 2.0, 4.0 - 2.0]
    assert [score.value for score in other] == [12.0 - 2.0, 14.0 - 2.0]
    assert [score.statuses["fussy"] for score in one] == ["left_out", "error", "left_out"]
    assert {score.statuses["fussy"] for score in other} == {"ok"}
    assert {score.status for score in one} == {"ok"}
    # What it said is recorded, and why it does not count.
    assert one[0].parts["fussy"] == 1.0 and "fussy: left out" in one[0].reason
    assert "an x" in one[1].reason


def test_steps_of_a_part_that_is_left_out_are_left_out() -> None:
    pool = reward_pool("exact")
    parts = {
        "a": Part(pool=pool, weight=2.0, optional=False),
        "b": Part(pool=pool, weight=3.0, optional="group"),
    }
    scores = {
        "a": Score(value=1.0, steps=((4, 0.5),)),
        "b": Score(value=1.0, steps=((2, 0.25), (3, 0.25))),
    }
    whole = combined(parts, scores, {})
    assert whole.value == 5.0 and sorted(whole.steps) == [(2, 0.75), (3, 0.75), (4, 1.0)]
    without = combined(parts, scores, left_out={"b": "error"})
    assert without.value == 2.0 and without.steps == ((4, 1.0),)


def test_a_group_that_has_no_part_left_has_no_scores(open_parts: Open) -> None:
    pool = open_parts(fussy=("fussy", 1.0, "group"), other=("fussy", 1.0, "group"))
    scores = only(pool.score([group("ok", "n")]))
    assert [score.value for score in scores] == [None, None]
    # "left_out" is said of parts only.
    assert [score.status for score in scores] == ["invalid", "invalid"]
    assert scores[0].statuses == {"fussy": "left_out", "other": "left_out"}
    assert [score.value for score in only(pool.score([group("ok", "pie")]))] == [2.0, 2.0]


def test_a_row_without_any_part_has_no_score(open_parts: Open) -> None:
    pool = open_parts(a=("fussy", 1.0, True), b=("fussy", 1.0, True))
    score = only(pool.score([group("x")]))[0]
    assert (score.value, score.status) == (None, "error")


@pytest.mark.parametrize("weight", [1e308, 1e300])
def test_a_sum_that_is_no_number_is_invalid(weight: float) -> None:
    pool = reward_pool("exact")
    parts = {name: Part(pool=pool, weight=weight, optional=False) for name in "ab"}
    score = combined(parts, {name: Score(value=1e8) for name in "ab"}, {})
    assert (score.value, score.status) == (None, "invalid")
    assert "no finite number" in score.reason


def test_the_order_of_the_parts_changes_no_bit() -> None:
    pool = reward_pool("exact")
    weights = {"a": 0.1, "b": 0.2, "c": 0.3, "d": -0.6}
    values = {
        name: Score(value=value) for name, value in zip("abcd", (0.7, 0.1, 3.3, 0.9), strict=True)
    }
    parts = {name: Part(pool=pool, weight=w, optional=False) for name, w in weights.items()}
    forwards = combined(parts, values, {})
    backwards = combined(parts, dict(reversed(values.items())), {})
    assert forwards.value == backwards.value


def test_the_parts_are_scored_at_the_same_time(open_parts: Open) -> None:
    """Each part waits until processes of all three have come."""
    parts = dict.fromkeys("abc", ("meeting", 1.0))
    pool = open_parts(120.0, **parts)
    assert [score.value for score in only(pool.score([group("1")]))] == [3.0]


def test_a_part_that_cannot_be_loaded_is_named(open_parts: Open) -> None:
    with pytest.raises(RewardDefinitionError, match=r"^reward\.parts\.lost\.name=.*nothing"):
        open_parts(long=("length", 1.0), lost=("nothing", 1.0))
    with pytest.raises(RewardDefinitionError, match=r"^reward\.parts\.bad\.name=.*a dry call"):
        open_parts(long=("length", 1.0), bad=("wrong", 1.0)).start()


def test_a_stop_reaches_every_part(open_parts: Open) -> None:
    pool = open_parts(120.0, a=("endless", 1.0), b=("endless", 1.0), c=("length", 1.0))
    pool.start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        pool.score([group("1", "2")], Patience(lambda: time.monotonic() - began > 0.5, 60.0))
    assert time.monotonic() - began < 10


class Fails(InlinePool):
    """A pool that fails, or waits until it is given up; its workers take a while to end."""

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        assert patience is not None

        def work(group: Group) -> Scores:
            while self.name == "waits":
                patience.look("nothing")
            raise RewardError("as asked")

        try:
            in_threads(work, groups, patience, most=1)
        finally:
            time.sleep(0.5 if self.name == "fails" else 0.0)
        return []


@pytest.mark.parametrize("names", [("fails", "waits"), ("waits", "fails")])
def test_an_error_of_a_part_is_told_and_not_that_it_gave_up_the_others(
    names: tuple[str, str],
) -> None:
    parts = {
        name: Part(pool=Fails(name, lambda *_: []), weight=1.0, optional=False) for name in names
    }
    with pytest.raises(RewardError, match="as asked"):
        PartsPool(parts).score([group("1")])


def test_what_parts_took_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[Metrics] = [
        {"system/questions": 2.0, "time/asked_s": 0.5},
        {"system/questions": 3.0},
        {},
    ]
    parts: dict[str, Part] = {}
    for number, counted in enumerate(took):
        pool = InlinePool("exact", lambda prompt, completions: [])
        monkeypatch.setattr(pool, "counters", lambda counted=counted: counted)
        parts[str(number)] = Part(pool=pool, weight=1.0, optional=False)
    assert PartsPool(parts).counters() == {"system/questions": 5.0, "time/asked_s": 0.5}
