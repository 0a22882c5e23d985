"""MLflow's own server on this machine shows a run: what it was made with, and what came of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.recipes.session import Session
from oxrl.runs.files import read_records
from oxrl.runs.mirrors import Trackers
from oxrl_trackers.mlflow_tracker import seal_of
from support.small_runs import rl_config

STARTS_S = 500.0  # the server takes ten seconds, and a busy machine many times that


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server with a store of its own."""
    port = free_port()
    store = ["--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}"]
    store += ["--artifacts-destination", str(tmp_path / "server-artifacts")]
    place = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command = [str(Path(sys.executable).with_name("mlflow")), "server", *store, *place]
    log = (tmp_path / "server.log").open("w")
    # Evaluations of others that a server may run in processes of its own.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        command, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + STARTS_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert answer.status == 200
            break
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(0.5)
    yield address
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)
    log.close()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_server_shows_a_run_with_what_it_read_and_its_checkpoints_in_line(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setattr("oxrl.runs.mirrors.FINISHED_S", STARTS_S)
    first = {"mlflow": True, "steps": 2, "checkpoint_every": 1, "keep_checkpoints": 3}
    run(rl_config(tmp_path, "run", run=first))
    again = rl_config(tmp_path, "run", run=first | {"steps": 3})
    run(again, resume=True)
    directory = again.run.directory
    ids = json.loads((directory / "mlflow.json").read_text())
    client = MlflowClient(tracking_uri=server)
    (experiment,) = [e for e in client.search_experiments() if e.name == "oxrl"]
    (found,) = client.search_runs([experiment.experiment_id])
    # One run under one id across the resume, with every step.
    assert found.info.run_id == ids["run_id"] and found.info.status == "FINISHED"
    rewards = client.get_metric_history(ids["run_id"], "reward/mean")
    recorded = [line["reward/mean"] for line in read_records(directory / "metrics.jsonl")]
    assert {metric.step: metric.value for metric in rewards} == dict(enumerate(recorded, start=1))
    # What it was made with.
    assert found.data.params["train.alg_name"] == "sgrpo" and found.data.params["run.steps"] == "2"
    assert found.data.tags["resumed.run.steps"] == "3"
    git = json.loads((directory / "environment.json").read_text())["git"]
    if git:
        assert re.fullmatch("[0-9a-f]{40}", found.data.tags["mlflow.source.git.commit"])
    (data,) = found.inputs.dataset_inputs
    (sha256,) = json.loads((directory / "data.json").read_text()).values()
    assert data.dataset.name == "prompts.jsonl" and data.tags[0].value == sha256
    files = {file.path for file in client.list_artifacts(ids["run_id"])}
    assert {"config.yaml", "environment.json", "inputs.json", "samples.json"} <= files
    assert ("git.diff" in files) == (directory / "git.diff").is_file()
    table = json.loads(Path(client.download_artifacts(ids["run_id"], "samples.json")).read_text())
    assert len(table["data"]) == 48 and "reward" in table["columns"]
    # Every checkpoint with the hash of its manifest, and what it came from.
    models = client.search_logged_models([experiment.experiment_id])
    by_step: dict[int, Any] = {int(model.params["step"]): model for model in models}
    assert sorted(by_step) == [0, 1, 2, 3]
    assert by_step[0].tags["oxrl.parent"] == "builtin:tiny"
    for step in (1, 2, 3):
        before = by_step[step - 1].tags["oxrl.sha256"]
        assert by_step[step].tags["oxrl.parent"] == before
        assert by_step[step].source_run_id == ids["run_id"]
    newest = directory / "checkpoints" / "step_00000003"
    assert by_step[3].tags["oxrl.sha256"] == seal_of(newest)
    with urllib.request.urlopen(f"{server}/", timeout=30) as page:
        assert b"MLflow" in page.read()


@pytest.mark.full
def test_a_tracker_that_never_answers_takes_less_than_a_hundredth_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of a step that the run spends on its trackers, where one hangs from the start."""
    spent: list[float] = []
    plain = Trackers.check

    def timed(self: Trackers) -> None:
        started = time.thread_time()
        plain(self)
        spent.append(time.thread_time() - started)

    steps: list[float] = []
    record = Session.record

    def recorded(self: Session, step: int, metrics: dict[str, float], *, tokens: float) -> None:
        record(self, step, metrics, tokens=tokens)
        steps.append(time.thread_time())

    monkeypatch.setattr(Trackers, "check", timed)
    monkeypatch.setattr(Session, "record", recorded)
    with socket.socket() as silent:  # takes connections, says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        monkeypatch.setattr("oxrl.runs.mirrors.FINISHED_S", 1.0)
        run(rl_config(tmp_path, "run", run={"mlflow": True, "steps": 30, "checkpoint_every": 0}))
    share = sum(spent[1:]) / (steps[-1] - steps[0])
    sys.stdout.write(f"{share:.5%} of {steps[-1] - steps[0]:.2f} s in {len(steps)} steps\n")
    assert share < 0.01
