"""How long each phase may keep others waiting, and what is said meanwhile."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from oxrl.config.sections.run import RunConfig
from oxrl.errors import DeadlineError
from oxrl.plan.plan import plan_text
from oxrl.runs import waiting
from oxrl.runs.console import run_logging
from oxrl.runs.waiting import Patience, waiting_for
from oxrl.tables.watch import Deadlines
from support.small_runs import sft_config


def run_section(**settings: object) -> RunConfig:
    return RunConfig.model_validate({"name": "run", "steps": 1, **settings})


def test_a_phase_has_its_seconds_and_more_for_bytes_where_bytes_take_time() -> None:
    waits = run_section(deadlines={"load": 60, "rollout": 5}, deadline_s=30).waits
    assert waits.of("load", 2 * 10**9).seconds == 60 + 2 * 50
    assert waits.of("sync", 10**9).seconds == 30 + 50
    assert waits.of("rollout", 10**9).seconds == 5
    assert waits.of("step", 10**9).seconds == 30
    assert run_section(deadline_s=30).waits.of("load").seconds == 600
    assert run_section(deadline_s=3000, seconds_per_gb=0).waits.of("load", 10**9).seconds == 3000


def test_an_error_names_the_phase_its_seconds_and_its_bytes() -> None:
    waits = run_section(deadlines={"load": 60, "step": 5}).waits
    assert str(waits.of("step")) == "run.deadlines.step=5 s"
    assert str(waits.of("load", 14 * 10**9)) == (
        "760 s (run.deadlines.load=60 s, and run.seconds_per_gb=50 for 14 GB)"
    )


@pytest.mark.parametrize("wrong", [{"loads": 5}, {"load": 0}, {"load": float("inf")}, {"step": -1}])
def test_what_is_no_deadline_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        run_section(deadlines=wrong)


def test_the_plan_tells_every_deadline(tmp_path: Path) -> None:
    text = plan_text(sft_config(tmp_path, "plan", ["run.deadlines={step: 7}"]))
    [line] = [line for line in text.splitlines() if line.startswith("deadlines")]
    assert "load 600 s" in line and "step 7 s" in line and "rollout 600 s" in line


def test_a_wait_is_told_of_and_not_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oxrl")
    monkeypatch.setattr(waiting, "SAY_S", 0.05)
    monkeypatch.setattr(waiting, "SAY_S", 0.05)
    with waiting_for("weights to be sent", Deadlines.alike(9).of("sync", 10**9)):
        time.sleep(0.12)
    assert "sync: waiting for weights to be sent, 0 s of 59 s (run.deadlines.sync=9" in caplog.text
    told = len(caplog.records)
    time.sleep(0.1)
    assert len(caplog.records) == told  # the wait is over
    short = Patience(deadline_s=0.2)
    with pytest.raises(DeadlineError, match=r"waited run\.deadlines\.rollout=0\.2 s for a score"):
        wait_with(short)
    assert "rollout: waiting for a score, 0 s of run.deadlines.rollout=0.2 s" in caplog.text


def wait_with(short: Patience) -> None:
    while True:
        short.look("a score. Raise it")
        time.sleep(0.02)


def test_what_is_waited_for_is_on_the_terminal_unless_it_is_to_be_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deadline = Deadlines.alike(9).of("step")
    for mode, lines in (("plain", 1), ("quiet", 0), ("verbose", 1)):
        with run_logging(tmp_path / "run.log", mode):  # pyright: ignore[reportArgumentType]
            waiting.say_waiting("ranks", deadline, 31.0)
        assert capsys.readouterr().err.count("WAITING: step: waiting for ranks, 31 s of") == lines


def stubborn(seconds: float) -> subprocess.Popen[bytes]:
    """A process that does not end for so long, whatever it is sent: a stand-in for one that the
    kernel keeps.
    """
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])


@pytest.mark.parametrize("ends", [True, False])
def test_a_killed_process_is_waited_for_and_not_for_ever(
    ends: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "KILLED_S", 0.2)
    ways: list[Callable[[subprocess.Popen[bytes]], int]] = [
        lambda process: waiting.end_of(process, "a worker"),
        lambda process: waiting.end_of_episode(process.pid),
    ]
    for way in ways:
        process = stubborn(30)
        if ends:
            process.kill()
            monkeypatch.setattr(waiting, "KILLED_S", 20)
        began = time.monotonic()
        assert way(process) == -signal.SIGKILL
        assert time.monotonic() - began < 10
        process.kill()
        process.wait(20)
    assert ("was killed and is still there after 0.2 s" in caplog.text) is not ends
