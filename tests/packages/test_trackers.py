"""Trackers beside MLflow: what they hold is what the record holds; one that cannot work costs a
warning.
"""

from __future__ import annotations

import json
import logging
import math
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from oxrl.errors import MissingExtraError
from oxrl.plan.preflight import Prepared, check_trackers
from oxrl.runs.directory import RunDirectory, open_run
from oxrl.runs.files import read_records
from oxrl.runs.mirrors import Trackers
from oxrl.runs.recorder import Recorder
from oxrl.tables.watch import TRACKERS
from support.small_runs import rl_config

CONFIG = "run: {name: mirrored, steps: 4}\ntrain: {alg_name: sgrpo, lr: 1.0e-06}\n"
MISSING = [name for name in TRACKERS if find_spec(name) is None]


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name in MISSING, reason=f"the package {name} is not installed")


def record(run: RunDirectory, steps: range) -> dict[str, int]:
    """What a checkpoint after the first of the steps would note of the record."""
    noted: dict[str, int] = {}
    with Recorder(run) as recorder:
        for step in steps:
            loss = math.nan if step == 2 else 1e-9 * step
            recorder.record_step(step, {"reward/mean": step / 7, "eval/pass@1": loss})
            noted = noted or dict(recorder.offsets())
    return noted


def killed_and_resumed(path: Path, name: str) -> None:
    """Steps 1 to 3, a kill, and from step 1 on again to step 5."""
    with open_run(path, CONFIG, resume=False) as run:
        trackers = Trackers(run, [name])
        noted = record(run, range(1, 4))
        trackers.close("KILLED", timeout_s=120)
    with open_run(path, CONFIG.replace("steps: 4", "steps: 5"), resume=True) as run:
        with Recorder(run) as recorder:
            recorder.truncate(noted)
        trackers = Trackers(run, [name])
        record(run, range(2, 6))
        trackers.check()
        trackers.close(timeout_s=120)


def expected(path: Path) -> dict[tuple[str, int], float]:
    """(metric, step) -> value, as the record has it."""
    found: dict[tuple[str, int], float] = {}
    for line in read_records(path / "metrics.jsonl"):
        for name in ("reward/mean", "eval/pass@1"):
            found[name, line["step"]] = float(line[name])
    return found


def same(one: dict[tuple[str, int], list[float]], other: dict[tuple[str, int], float]) -> None:
    """Every value once, as float32 can hold it."""
    assert set(one) == set(other)
    for place, value in other.items():
        (shown,) = one[place]
        both_nan = math.isnan(shown) and math.isnan(value)
        assert both_nan or math.isclose(shown, value, rel_tol=1e-6), place


@needs("tensorboard")
def test_tensorboard_holds_what_the_record_holds_across_a_kill_and_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore
        EventAccumulator,
    )

    path = tmp_path / "run"
    killed_and_resumed(path, "tensorboard")
    assert caplog.text == ""
    read = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    found: dict[tuple[str, int], list[float]] = {}
    for name in read.Tags()["scalars"]:
        for event in read.Scalars(name):
            found.setdefault((name, event.step), []).append(event.value)
    same(found, expected(path))
    (config,) = read.Tensors("config")
    assert b"| train.alg_name | sgrpo |" in config.tensor_proto.string_val[0]
    outcomes = [event.tensor_proto.string_val[0] for event in read.Tensors("outcome")]
    assert outcomes == [b"KILLED", b"FINISHED"]


@needs("wandb")
def test_wandb_shows_a_run_offline_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    path = tmp_path / "run"
    killed_and_resumed(path, "wandb")
    assert caplog.text == ""
    run_id = json.loads((path / "wandb.json").read_text())["run_id"]
    folders = sorted((path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(run_id) for folder in folders)
    assert json.loads((path / "wandb.json").read_text())["logged"] == 5


@needs("trackio")
def test_trackio_holds_what_the_record_holds_across_a_kill_and_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sqlite3

    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    path = tmp_path / "run"
    killed_and_resumed(path, "trackio")
    assert caplog.text == ""
    with sqlite3.connect(path / "trackio" / "oxrl.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    database.close()
    assert {name for name, _, _ in rows} == {"mirrored"}
    found: dict[tuple[str, int], list[float]] = {}
    for _, step, text in rows:
        for key, value in json.loads(text).items():
            if key in ("reward/mean", "eval/pass@1"):
                number = math.nan if value in (None, "NaN") else float(value)
                found.setdefault((key, step), []).append(number)
    same(found, expected(path))


@pytest.mark.skipif(not MISSING, reason="every tracker is installed")
def test_a_tracker_that_is_not_installed_is_refused_before_a_run(tmp_path: Path) -> None:
    absent = [name for name in MISSING if name != "mlflow"][0]
    cfg = rl_config(tmp_path, "run", run={"trackers": absent})
    with pytest.raises(MissingExtraError, match=rf'pip install .*\.\[{absent}\]"') as refused:
        check_trackers(cfg, Prepared())
    assert refused.value.exit_code == 2


@pytest.mark.skipif(not MISSING, reason="every tracker is installed")
def test_a_tracker_that_cannot_work_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that goes on somewhere else may not have it."""
    with open_run(tmp_path, CONFIG, resume=False) as run, caplog.at_level(logging.WARNING):
        trackers = Trackers(run, [MISSING[0]])
        record(run, range(1, 4))
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            trackers.check()
            time.sleep(0.05)
        trackers.check()
        trackers.close()
    assert len(caplog.records) == 1
    assert "metrics.jsonl is complete" in caplog.text and "No module named" in caplog.text
    assert [line["step"] for line in read_records(run.metrics)] == [1, 2, 3]
