"""MLflow mirrors metrics.jsonl from a process of its own; nothing it does or fails to do reaches
the run.
"""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import time
from pathlib import Path

import pytest

from oxrl.errors import Interrupted
from oxrl.runs.directory import RunDirectory, open_run
from oxrl.runs.files import Chain, read_records
from oxrl.runs.mirrors import Trackers
from oxrl.runs.recorder import CHAIN, Recorder
from oxrl.runs.tracker_process import read_new_steps
from oxrl_trackers.mlflow_names import hide_password, mlflow_name

CONFIG = "run: {name: mirrored, steps: 4}\ntrain: {alg_name: sgrpo, lr: 1.0e-06}\n"


def record(run: RunDirectory, steps: range) -> None:
    with Recorder(run) as recorder:
        for step in steps:
            recorder.record_step(
                step,
                {"reward/mean": step / 7, "mismatch/kl": math.nan if step == 2 else 1e-9 * step},
            )


def mirrored(path: Path) -> dict[tuple[str, int], list[float]]:
    """(key, step) -> every value logged, straight from the database file."""
    with sqlite3.connect(path / "mlflow.db") as database:
        rows = database.execute("select key, step, value, is_nan from metrics").fetchall()
    database.close()
    values: dict[tuple[str, int], list[float]] = {}
    for key, step, value, is_nan in rows:
        values.setdefault((key, step), []).append(math.nan if is_nan else value)
    return values


def what_a_run_leaves(path: Path) -> None:
    """Hashes of its data, two checkpoints and a sample."""
    (path / "data.json").write_text(json.dumps({"data/sums.jsonl": "5a" * 32}))
    for step in (0, 3):
        folder = path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps({"sha256": f"seal of {step}"}))
    (path / "samples.jsonl").write_text('{"step": 0, "prompt": "1+1=", "response": "2"}\n')


def query(path: Path, sql: str) -> dict[str, str]:
    with sqlite3.connect(path / "mlflow.db") as database:
        rows = dict(database.execute(sql).fetchall())
    database.close()
    return rows


def test_mlflow_holds_what_the_record_holds_across_a_kill_and_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test for all of it: starting MLflow takes seconds."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    with open_run(path, CONFIG, resume=False) as run:
        what_a_run_leaves(path)
        tracker = Trackers(run, ["mlflow"])
        record(run, range(1, 4))
        tracker.close("KILLED", timeout_s=120)
    first = mirrored(path)
    # The resumed run starts from a checkpoint of step 1, repeats 2 and 3, and is given one more
    # step.
    with open_run(path, CONFIG.replace("steps: 4", "steps: 5"), resume=True) as run:
        with Recorder(run) as recorder:
            lines = run.metrics.read_bytes().splitlines(keepends=True)
            chain = Chain()
            chain.add(lines[0])
            recorder.truncate({"metrics.jsonl": len(lines[0]), CHAIN: chain.value()})
        with Trackers(run, ["mlflow"]) as tracker:
            record(run, range(2, 6))
            tracker.check()
            tracker.close(timeout_s=120)
        record_now = list(read_records(run.metrics))

    values = mirrored(path)
    assert {step for _, step in first} == {1, 2, 3}
    assert [line["step"] for line in record_now] == [1, 2, 3, 4, 5]
    assert all(len(logged) == 1 for logged in values.values()), "no step is logged twice"
    expected = {
        (key, line["step"]): float(value)
        for line in record_now
        for key, value in line.items()
        if key != "system/chain"
    }
    assert set(values) == set(expected)
    for place, value in expected.items():
        logged = values[place][0]
        assert logged == value or (math.isnan(logged) and math.isnan(value)), place
    assert query(path, "select name, status from runs") == {"mirrored": "FINISHED"}
    params = query(path, "select key, value from params")
    assert (params["train.alg_name"], params["run.steps"], params["train.lr"]) == (
        "sgrpo",
        "4",
        "1e-06",
    )
    tags = query(path, "select key, value from tags")
    assert tags["resumed.run.steps"] == "5"
    facts = json.loads((path / "environment.json").read_text())
    if facts["git"]:
        assert tags["mlflow.source.git.commit"] == facts["git"]["commit"]
    assert query(path, "select name, digest from datasets") == {"sums.jsonl": "5a" * 18}
    names = query(path, "select name, source_run_id from logged_models")
    assert set(names) == {"step_00000000", "step_00000003"} and len({*names.values()}) == 1
    parents = "select tag_value, model_id from logged_model_tags where tag_key = 'oxrl.parent'"
    assert "seal of 0" in query(path, parents)
    (table,) = path.glob("artifacts/*/artifacts/samples.json")
    assert json.loads(table.read_text())["data"][0][:3] == [0, "1+1=", "2"]
    # Everything stays in the run directory: no mlruns where the program was started.
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("made", ["nothing", "a table", "all tables"])
def test_a_database_that_mlflow_was_ended_in_the_making_of_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    path = tmp_path / "run"
    with open_run(path, CONFIG, resume=False) as run:
        database = sqlite3.connect(path / "mlflow.db")
        if made != "nothing":
            database.execute("CREATE TABLE metrics (key VARCHAR)")
        if made == "all tables":
            database.execute("CREATE TABLE runs (name VARCHAR)")
        database.commit()
        database.close()
        with Trackers(run, ["mlflow"]) as tracker:
            record(run, range(1, 4))
            tracker.close(timeout_s=120)
    assert {step for _, step in mirrored(path)} == {1, 2, 3}
    assert query(path, "select name, status from runs") == {"mirrored": "FINISHED"}


def test_a_database_with_a_run_or_that_is_none_is_left_as_it_is(tmp_path: Path) -> None:
    from oxrl_trackers.mlflow_tracker import remove_unfinished  # MLflow, which takes seconds

    held = tmp_path / "mlflow.db"
    with sqlite3.connect(held) as database:
        database.execute("CREATE TABLE runs (name VARCHAR)")
        database.execute("INSERT INTO runs VALUES ('mine')")
    database.close()
    other = tmp_path / "other.db"
    other.write_bytes(b"no database" * 100)
    before = held.read_bytes()
    for file in (held, other, tmp_path / "none.db"):
        remove_unfinished(file)
    assert held.read_bytes() == before and other.is_file()
    assert not (tmp_path / "none.db").exists()


def test_a_mirror_notices_that_the_record_was_cut_and_misses_no_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert read_new_steps(metrics, 0, -1) == ([], 0)
    metrics.write_text(
        "".join(f'{{"step": {step}, "time/step_s": 1.5}}\n' for step in range(1, 8)) + '{"step": 8'
    )
    records, offset = read_new_steps(metrics, 0, -1)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7]
    # The run goes back to step 2 and repeats the rest with other timings, past the place the mirror
    # had reached.
    lines = metrics.read_text().splitlines(keepends=True)[:2]
    metrics.write_text(
        "".join(lines)
        + "".join(f'{{"step": {step}, "time/step_s": 1.25}}\n' for step in range(3, 11))
    )
    records, offset = read_new_steps(metrics, offset, 7)
    assert [record["step"] for record in records] == [8, 9, 10]
    assert offset == metrics.stat().st_size
    # Cut and not yet grown back.
    metrics.write_text("".join(lines))
    assert read_new_steps(metrics, offset, 10) == ([], len("".join(lines)))


def test_an_mlflow_that_cannot_work_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://nowhere")
    with open_run(tmp_path, CONFIG, resume=False) as run, caplog.at_level(logging.WARNING):
        tracker = Trackers(run, ["mlflow"])
        record(run, range(1, 4))
        deadline = time.monotonic() + 120
        while not caplog.records and time.monotonic() < deadline:
            tracker.check()
            time.sleep(0.05)
        tracker.check()
        tracker.close()
    assert len(caplog.records) == 1
    assert "metrics.jsonl is complete" in caplog.text and "no-such-scheme" in caplog.text
    assert [line["step"] for line in read_records(run.metrics)] == [1, 2, 3]


def test_an_mlflow_that_hangs_is_left_behind_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A port that nobody listens on: MLflow retries for minutes.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with open_run(tmp_path, CONFIG, resume=False) as run, caplog.at_level(logging.WARNING):
        started = time.monotonic()
        with pytest.raises(Interrupted), Trackers(run, ["mlflow"]):
            record(run, range(1, 4))
            raise Interrupted("stopped by SIGTERM")
        assert time.monotonic() - started < 10
    assert "was not done after 2 s" in caplog.text


def test_a_metric_name_that_mlflow_refuses_is_spelled_in_letters_it_takes() -> None:
    assert mlflow_name("eval/pass@1") == "eval/pass_at_1"
    assert mlflow_name("reward/mean/a,b") == "reward/mean/a_b"
    assert mlflow_name("update/grad_norm") == "update/grad_norm"


@pytest.mark.parametrize(
    ("address", "plain", "known"),
    [
        ("https://ann:p%40ss@host:5000/a?b", "https://host:5000/a?b", ("ann", "p@ss")),
        ("http://ann@host", "http://host", ("ann", "")),
        ("http://host:5000", "http://host:5000", None),
        ("sqlite:////tmp/a@b.db", "sqlite:////tmp/a@b.db", None),
        ("", "", None),
    ],
)
def test_a_password_in_the_address_goes_where_no_message_shows_it(
    address: str, plain: str, known: tuple[str, str] | None
) -> None:
    environment = {"MLFLOW_TRACKING_URI": address}
    assert hide_password(environment) == plain
    assert environment["MLFLOW_TRACKING_URI"] == plain
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    assert tuple(environment.get(name) for name in names) == (known or (None, None))


def test_the_mirror_runs_no_code_of_the_working_directory_and_logs_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.py").write_text("open('planted', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with open_run(tmp_path / "run", CONFIG, resume=False) as run:
        Trackers(run, ["mlflow"]).close(timeout_s=120)
    assert not (tmp_path / "planted").exists()
    log = (tmp_path / "run" / "mlflow.log").read_text()
    assert "127.0.0.1" in log
    assert "secret" not in log
