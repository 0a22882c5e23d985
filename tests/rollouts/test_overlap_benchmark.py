"""`benchmarks/overlap.py`: what it leaves out, and that it goes through."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "overlap.py"


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return runpy.run_path(str(SCRIPT))


def test_whole_waves_are_left_out_and_counted(overlap: dict[str, Any]) -> None:
    case = overlap["Case"]
    waves = case("waves", 4, 1)
    assert (waves.block, waves.edge, waves.batches(7)) == (2, 6, 20)
    assert (case("logical", 4, 1).edge, case("logical", 4, 1).batches(7)) == (5, 17)
    assert (case("sequential", 0, 2).edge, case("sequential", 0, 2).batches(7)) == (1, 9)


def test_training_takes_as_long_as_ideal_sampling(overlap: dict[str, Any]) -> None:
    for processes in (1, 2):
        case = overlap["Case"]("logical", 4, processes)
        work = overlap["work_of"](case, 10)
        assert work.rows == 2 * work.slots == 64 * processes
        assert work.train_s == pytest.approx(work.ideal_rounds * work.full_round_s)


@pytest.mark.full
def test_a_try_goes_through() -> None:
    words = ["--staleness", "0", "1", "--processes", "0", "--batches", "1", "--faster", "100"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'packages'}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [figures["case"] for figures in found] == [
        "sequential 0, a thread",
        "logical 1, a thread",
    ]
    assert all(figures["seconds"] > 0 and figures["simulated"] > 0 for figures in found)
