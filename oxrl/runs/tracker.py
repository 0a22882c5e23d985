"""MLflow as a mirror of metrics.jsonl, best effort.

The mirror is a process of its own that reads the record files as they grow, because importing MLflow, creating its
database and logging a step take seconds and tens of milliseconds that a thread would take from the training process.
It ends when the pipe to its standard input closes, so it outlives no run, however that run ends. Whatever goes wrong in
it is one warning in the run; metrics.jsonl stays complete, and a later start catches up.

Without MLFLOW_TRACKING_URI in the environment everything stays under the run directory (mlflow.db) and nothing uses the
network. No server is ever started.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from oxrl.errors import Interrupted
from oxrl.runs.directory import RunDirectory, flatten_config
from oxrl.runs.files import pretty_json, write_atomically
from oxrl.runs.jsonl import line_starts_at, read_records_from

logger = logging.getLogger(__name__)

STATE, LOG, DATABASE = "mlflow.json", "mlflow.log", "mlflow.db"
POLL_S = 5.0
PARENT = os.getppid()
EXPERIMENT = "oxrl"
PARAM_LIMIT = 6000  # characters of one value, MLflow's own limit
BATCH_LIMIT = 1000  # metrics in one call, MLflow's own limit
OUTCOMES = ("FINISHED", "FAILED", "KILLED")


class MLflowTracker(AbstractContextManager["MLflowTracker"]):
    """Starts the mirror of one run; `check` now and then; `close` when the run ends. Never raises.

    As a context manager it closes with the outcome that the exception, if any, stands for.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._log = run.path / LOG
        self._process: subprocess.Popen[bytes] | None = None
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "OMP_NUM_THREADS": "1"}
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "oxrl.runs.tracker", str(run.path)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **quiet},
                    start_new_session=True,  # Ctrl-C in the terminal is for the run, which then closes the mirror
                )
        except OSError as error:
            logger.warning("MLflow will not see this run: its process did not start: %s", error)

    def check(self) -> None:
        """Warn, once, if the mirror died. Costs microseconds."""
        if self._process is not None and self._process.poll() is not None:
            process, self._process = self._process, None
            process.communicate()  # closes the pipe
            self._report(process.returncode)

    def close(self, outcome: str = "FINISHED", *, timeout_s: float | None = None) -> None:
        """Let the mirror catch up, tell MLflow how the run ended (one of OUTCOMES), wait at most `timeout_s`, end it.

        The default is 20 s for a finished run, 2 s for one that is stopping: its next start catches up.
        """
        self.check()
        process, self._process = self._process, None
        if process is None:
            return
        timeout_s = timeout_s if timeout_s is not None else 20.0 if outcome == "FINISHED" else 2.0
        try:
            process.communicate(outcome.encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            logger.warning("MLflow was not done after %.0f s; metrics.jsonl is complete", timeout_s)
        else:
            self._report(process.returncode)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        stopped = kind is not None and issubclass(kind, Interrupted | KeyboardInterrupt)
        self.close("FINISHED" if kind is None else "KILLED" if stopped else "FAILED")

    def _report(self, returncode: int) -> None:
        if returncode != 0:
            said = self._log.read_text(encoding="utf-8", errors="replace").split("\n") if self._log.exists() else []
            last = next((line for line in reversed(said) if line.strip()), "it said nothing")
            logger.warning(
                "MLflow stopped seeing this run (metrics.jsonl is complete): %s (all of it in %s)", last, self._log
            )


def mirror(directory: Path) -> None:
    """The mirror's whole life: follow metrics.jsonl of the run in `directory` until standard input closes."""
    with (directory / f".{STATE}.lock").open("w") as lock:
        # The mirror of a killed run may still be catching up when the resumed run starts its own.
        fcntl.lockf(lock, fcntl.LOCK_EX)
        client, run_id, logged = _open(directory)
        offset = 0
        outcome = None
        while outcome is None:
            outcome = _said_within(POLL_S)
            records, offset = read_new_steps(directory / "metrics.jsonl", offset, logged)
            _log(client, run_id, records)
            logged = records[-1]["step"] if records else logged
        client.set_terminated(run_id, status=outcome)


def _said_within(seconds: float) -> str | None:
    """The outcome once standard input has closed ("KILLED" if nobody said one), None while the run goes on."""
    if not select.select([sys.stdin], [], [], seconds)[0]:
        # Workers that the run forked may hold the pipe open after the run itself was killed.
        return None if os.getppid() == PARENT else "KILLED"
    said = sys.stdin.read().strip()
    return said if said in OUTCOMES else "KILLED"


def _open(directory: Path) -> tuple[Any, str, int]:
    """(client, MLflow run id, last step that is there): a new run, or the one that an earlier start made."""
    from mlflow import MlflowClient  # slow to import, and only this process needs it
    from mlflow.entities import Param, RunTag

    client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / DATABASE}")
    environment = json.loads((directory / "environment.json").read_bytes())
    params = flatten_config((directory / "config.yaml").read_text(encoding="utf-8"))
    state = directory / STATE
    if state.exists():
        run_id: str = json.loads(state.read_bytes())["run_id"]
        run = client.get_run(run_id)
        client.update_run(run_id, status="RUNNING")
    else:
        found = client.get_experiment_by_name(EXPERIMENT)
        artifacts = (directory / "artifacts").as_uri()
        experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT, artifact_location=artifacts)
        run = client.create_run(experiment, run_name=str(params.get("run.name", directory.name)))
        run_id = run.info.run_id
        write_atomically(state, pretty_json({"run_id": run_id, "experiment_id": experiment}))
    # A param cannot be changed in MLflow; what a resume changed (run.steps for one) becomes a tag.
    texts, known = {key: str(value)[:PARAM_LIMIT] for key, value in params.items()}, run.data.params
    tags = {f"resumed.{key}": text for key, text in texts.items() if known.get(key, text) != text}
    tags |= {"oxrl.directory": str(directory), "oxrl.version": environment["packages"].get("oxrl")}
    git = environment.get("git") or {}
    tags |= {"mlflow.source.git.commit": git.get("commit"), "git.dirty": git.get("dirty")}
    client.log_batch(
        run_id,
        params=[Param(key, text) for key, text in texts.items() if key not in known],
        tags=[RunTag(key, str(value)) for key, value in tags.items() if value is not None],
    )
    return client, run_id, int(run.data.metrics.get("step", -1))


def read_new_steps(metrics: Path, offset: int, logged: int) -> tuple[list[dict[str, Any]], int]:
    """Complete lines of `metrics` from byte `offset` whose step is above `logged`, and the offset to go on from."""
    if not metrics.exists() or not line_starts_at(metrics, offset):
        offset = 0  # the run went back to a checkpoint and cut the file; what is logged already is skipped
    records: list[dict[str, Any]] = []
    for record, end in read_records_from(metrics, offset):
        offset = end
        if record["step"] > logged:
            records.append(record)
            logged = record["step"]
    return records, offset


def _log(client: Any, run_id: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Log each record's numbers, "step" last: its latest value is where a later mirror of the run goes on."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    logged = [
        Metric(mlflow_name(key), float(value), now, record["step"])
        for record in records
        for key, value in sorted(record.items(), key=lambda item: item[0] == "step")
    ]
    for start in range(0, len(logged), BATCH_LIMIT):
        client.log_batch(run_id, metrics=logged[start : start + BATCH_LIMIT])


def mlflow_name(key: str) -> str:
    """`key` in the letters that MLflow allows in a metric's name: eval/pass@1 becomes eval/pass_at_1."""
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))


if __name__ == "__main__":
    os.nice(10)  # training goes first
    mirror(Path(sys.argv[1]))
