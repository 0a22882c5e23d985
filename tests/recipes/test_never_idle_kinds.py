"""Every kind of run whose sampler goes on while a batch trains gives the same bytes every time, also
where it is killed and stopped by signals while requests are in flight.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import OxrlError
from support.killed_runs import start_run
from support.never_idle_kinds import KINDS, config, prepare, run_of_kind_in_child
from support.small_runs import check_same, metric_lines

FULL = pytest.mark.full
# In one process two runs take a second or two each.
QUICK = ("ppo", "adapter", "images")
DEADLINE_S = 240.0


@pytest.mark.parametrize(
    ("kind", "processes"),
    [
        *(pytest.param(kind, 0, marks=() if kind in QUICK else FULL) for kind in KINDS),
        *(pytest.param(kind, 2, marks=FULL) for kind in KINDS),
    ],
)
def test_two_runs_are_equal(
    kind: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(kind, monkeypatch.setattr)
    one, other = (
        config(tmp_path, name, kind, processes=processes, steps=5, checkpoint_every=2)
        for name in ("one", "other")
    )
    run(one)
    run(other)
    check_same(one.run.directory, other.run.directory)
    assert max(line["samples/in_flight"] for line in metric_lines(one.run.directory)) > 0


def body(cfg: Config, kind: str, evaluating: Path) -> None:
    """Of a process that is going to get a signal; a file is there while it evaluates."""
    from oxrl.recipes.scored_answers import Evaluation

    measure = Evaluation.measure

    def noted(self: Evaluation, *given: object) -> object:
        evaluating.touch()
        try:
            return measure(self, *given)  # pyright: ignore[reportArgumentType]
        finally:
            evaluating.unlink(missing_ok=True)

    Evaluation.measure = noted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        run_of_kind_in_child(cfg, kind)
    except OxrlError as error:
        sys.exit(error.exit_code)


def signalled(cfg: Config, kind: str, sent: signal.Signals, chance: random.Random) -> str:
    """Start or go on with a run, and send it a signal at a random moment of its next steps.

    Returns:
        Where the signal was to come, or "finished".
    """
    directory = cfg.run.directory
    evaluating = directory.with_suffix(".evaluating")
    evaluating.unlink(missing_ok=True)
    metrics = directory / "metrics.jsonl"
    before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    process = start_run(cfg, body, kind, evaluating)
    wanted = before + 1
    evaluates = cfg.data.eval is not None and chance.random() < 0.6
    deadline = time.monotonic() + DEADLINE_S
    while process.is_alive():
        assert time.monotonic() < deadline
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if lines >= wanted and (not evaluates or evaluating.exists()):
            break
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.02 if evaluates else 0.3))
    if process.is_alive():
        os.kill(process.pid or 0, sent)
    process.join(DEADLINE_S)
    if process.exitcode == 0:
        return "finished"
    assert process.exitcode == (-signal.SIGKILL if sent == signal.SIGKILL else 75)
    return f"{sent.name} in {'an evaluation' if evaluates else 'a step'}"


@FULL
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_and_stopped_again_and_again_equals_the_uninterrupted_one(
    kind: str, processes: int, tmp_path: Path
) -> None:
    whole, cut = (
        config(tmp_path, name, kind, processes=processes, steps=14) for name in ("whole", "cut")
    )
    process = start_run(whole, run_of_kind_in_child, kind)
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    chance = random.Random(f"{kind} {processes}")
    signals = [signal.SIGKILL, signal.SIGTERM] * 4
    chance.shuffle(signals)
    for sent in signals:
        signalled(cut, kind, sent, chance)
    process = start_run(cut, run_of_kind_in_child, kind)
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    check_same(cut.run.directory, whole.run.directory)
