"""How long a checkpoint is waited for, by a clock that only goes on while somebody sleeps; and which
evaluation is good enough, or the best.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oxrl.checkpoint import saving
from oxrl.checkpoint.saving import Saver, SavingOptions
from oxrl.errors import DeadlineError
from oxrl.recipes.offline_loop import RowsProgress, forget_lost_best, keep_best
from oxrl.recipes.session import Progress, Session
from oxrl.runs.ranks import ALONE
from oxrl.tables.watch import Deadlines


class Disk:
    """An engine whose bytes reach the disk by a timetable, and the clock that it looks at.

    Args:
        written: bytes by the second from which on they are written.
        done_s: the second in which all are.
    """

    def __init__(self, written: dict[float, int], done_s: float) -> None:
        self.now = 0.0
        self._written = written
        self._done_s = done_s

    def monotonic(self) -> float:
        return 1000.0 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def save_progress(self) -> tuple[int, bool]:
        there = [count for second, count in self._written.items() if second <= self.now]
        return max(there, default=0), self.now >= self._done_s

    def begin_save(self, directory: Path, background: bool) -> bool:
        return True

    def end_save(self) -> None: ...
    def drop_save(self) -> None: ...


class Writer:
    def fill(self, write: Any) -> None:
        write(Path())

    def complete(self, end: Any) -> None:
        end()

    def drop(self) -> None: ...


def saved(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Save one checkpoint with a deadline of 10 s; what was said meanwhile."""
    monkeypatch.setattr(saving, "time", disk)
    waits = Deadlines.alike(10.0, seconds_per_gb=0.0)
    origin: Any = None
    options = SavingOptions(background=False, waits=waits, origin=origin, first_refers=False)
    said: list[str] = []
    writer: Any = Writer()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    Saver(ALONE, options, say=said.append).save({".": disk}, 3, lambda: writer, wait=True)  # pyright: ignore
    return said


def test_a_disk_that_goes_on_is_waited_for_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Disk({8.0 * n: 1_000_000 * n for n in range(20)}, done_s=160.0)
    saved(slow, monkeypatch)
    assert slow.now >= 160.0


@pytest.mark.parametrize("silent_from_s", [0.0, 8.0, 56.0])
def test_a_disk_that_writes_nothing_for_the_deadline_hangs(
    silent_from_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [8.0 * n for n in range(20) if 8.0 * n <= silent_from_s]
    hangs = Disk({second: 1_000_000 * n for n, second in enumerate(times)}, done_s=1e9)
    with pytest.raises(DeadlineError, match="the disk hangs"):
        saved(hangs, monkeypatch)
    assert silent_from_s + 10.0 < hangs.now < silent_from_s + 10.0 + 2 * saving.SLOWEST_LOOK_S


@pytest.mark.parametrize(("found", "lower", "met"), [
    (0.5, False, True),
    (0.5, True, True),
    (0.6, False, True),
    (0.6, True, False),
    (0.4, False, False),
    (0.4, True, True),
    (float("nan"), False, False),
    (float("nan"), True, False),
    (None, False, False),
])  # fmt: skip
def test_a_score_that_is_as_good_as_what_was_asked_for_is_good_enough(
    found: float | None, lower: bool, met: bool
) -> None:
    told: list[str] = []
    options = SimpleNamespace(stop_at=0.5)
    session: Any = SimpleNamespace(_options=options, ranks=ALONE, message=told.append)
    progress = Progress()
    Session.note_score(session, progress, found, lower=lower)
    assert progress.good_enough is met
    assert len(told) == met


@pytest.mark.parametrize("lower", [False, True])
def test_a_lost_best_is_forgotten_and_written_anew_by_the_next_evaluation(
    lower: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[int] = []
    run = SimpleNamespace(path=tmp_path)
    session: Any = SimpleNamespace(
        run=run, ranks=ALONE, keep_best=lambda engine, step: kept.append(step)
    )
    learner: Any = SimpleNamespace(engines={".": None}, lower_is_better=lower)
    never = RowsProgress(step=4)
    forget_lost_best(session, never)
    assert not caplog.records
    # What was the best is not there: a worse one takes its place.
    progress = RowsProgress(step=4, best=0.9 if not lower else -0.1)
    forget_lost_best(session, progress)
    assert progress.best is None
    assert "best/ is not the best of the steps so far: it is gone" in caplog.text
    keep_best(session, learner, progress, 0.5)
    assert (kept, progress.best) == ([4], -0.5 if lower else 0.5)
    progress.step = 5
    keep_best(session, learner, progress, 0.5)  # no better
    keep_best(session, learner, progress, float("nan"))
    assert kept == [4]
    keep_best(session, learner, progress, 0.4 if lower else 0.6)
    assert kept == [4, 5]
