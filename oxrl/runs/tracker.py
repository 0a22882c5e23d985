"""MLflow as a mirror of metrics.jsonl, best effort.

The mirror is a process of its own that reads the record files as they grow, because importing
MLflow, creating its database and logging a step take seconds and tens of milliseconds that a thread
would take from the training process. It ends when the pipe to its standard input closes, so it
outlives no run, however that run ends. Whatever goes wrong in it is one warning in the run;
metrics.jsonl stays complete, and a later start catches up.

Without MLFLOW_TRACKING_URI in the environment everything stays under the run directory (mlflow.db)
and nothing uses the network. No server is ever started.
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
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from oxrl.errors import Interrupted
from oxrl.runs.directory import RunDirectory, flatten_config
from oxrl.runs.files import line_starts_at, pretty_json, read_records_from, write_atomically

logger = logging.getLogger(__name__)

POLL_S = 5.0
EXPERIMENT = "oxrl"
PARAM_LIMIT = 6000  # characters of one value, MLflow's own limit
BATCH_LIMIT = 1000  # metrics in one call, MLflow's own limit


class MLflowTracker(AbstractContextManager["MLflowTracker"]):
    """Starts the mirror of one run; `check` now and then; `close` when the run ends. Never raises.

    As a context manager it closes with the outcome that the exception, if any, stands for.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._log = run.path / "mlflow.log"
        self._process: subprocess.Popen[bytes] | None = None
        quiet = os.environ | {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "true",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "oxrl.runs.tracker", str(run.path), str(os.getpid())]
        try:
            with self._log.open("ab") as log:
                # A session of its own: Ctrl-C in the terminal is for the run, which then closes the
                # mirror.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=quiet,
                    start_new_session=True,
                )
        except OSError as error:
            logger.warning("MLflow will not see this run: its process did not start: %s", error)

    def check(self) -> None:
        """Warn, once, if the mirror died. Costs microseconds."""
        if self._process is not None and self._process.poll() is not None:
            self.close()

    def close(self, outcome: str = "FINISHED", *, timeout_s: float | None = None) -> None:
        """Let the mirror catch up, tell MLflow how the run ended (its own word), wait at most
        `timeout_s`, end it.

        The default is 20 s for a finished run, 2 s for one that is stopping: its next start catches
        up.
        """
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
            return
        if process.returncode != 0:
            said = (
                self._log.read_text(encoding="utf-8", errors="replace").strip()
                if self._log.exists()
                else ""
            )
            why = (said or "it said nothing").rpartition("\n")[2]
            text = (
                "MLflow stopped seeing this run (metrics.jsonl is complete): %s (all of it in %s)"
            )
            logger.warning(text, why, self._log)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        stopped = kind is not None and issubclass(kind, Interrupted | KeyboardInterrupt)
        self.close("FINISHED" if kind is None else "KILLED" if stopped else "FAILED")


def mirror(directory: Path, run_pid: int) -> None:
    """The mirror's whole life: follow metrics.jsonl of the run in `directory` until standard input
    closes.
    """
    from mlflow.entities import Metric  # slow to import, and only this process needs it

    with (directory / ".mlflow.json.lock").open("w") as lock:
        # The mirror of a killed run may still be catching up when the resumed run starts its own.
        fcntl.lockf(lock, fcntl.LOCK_EX)
        client, run_id, logged = _open(directory)
        offset, closed, orphaned = 0, False, False
        while not (closed or orphaned):
            closed = bool(select.select([sys.stdin], [], [], POLL_S)[0])
            # Workers that the run forked may hold the pipe open after the run itself was killed.
            orphaned = os.getppid() != run_pid
            records, offset = read_new_steps(directory / "metrics.jsonl", offset, logged)
            logged, now = records[-1]["step"] if records else logged, int(time.time() * 1000)
            # "step" last: its latest value is where a later mirror of the run goes on.
            metrics = [
                Metric(mlflow_name(key), float(value), now, record["step"])
                for record in records
                for key, value in sorted(record.items(), key=lambda item: item[0] == "step")
            ]
            for start in range(0, len(metrics), BATCH_LIMIT):
                client.log_batch(run_id, metrics=metrics[start : start + BATCH_LIMIT])
        said = sys.stdin.read().strip() if closed else ""
        client.set_terminated(run_id, status=said or "KILLED")


def _open(directory: Path) -> tuple[Any, str, int]:
    """(client, MLflow run id, last step that is there): a new run, or the one that an earlier start
    made.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Param, RunTag

    client = MlflowClient(
        tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}"
    )
    environment = json.loads((directory / "environment.json").read_bytes())
    params = flatten_config((directory / "config.yaml").read_text(encoding="utf-8"))
    state = directory / "mlflow.json"
    if state.exists():
        run = client.get_run(json.loads(state.read_bytes())["run_id"])
        client.update_run(run.info.run_id, status="RUNNING")
    else:
        found = client.get_experiment_by_name(EXPERIMENT)
        artifacts = (directory / "artifacts").as_uri()
        experiment = (
            found.experiment_id
            if found
            else client.create_experiment(EXPERIMENT, artifact_location=artifacts)
        )
        run = client.create_run(experiment, run_name=str(params.get("run.name", directory.name)))
        write_atomically(
            state, pretty_json({"run_id": run.info.run_id, "experiment_id": experiment})
        )
    # A param cannot be changed in MLflow; what a resume changed (run.steps for one) becomes a tag.
    texts, known = {key: str(value)[:PARAM_LIMIT] for key, value in params.items()}, run.data.params
    tags = {f"resumed.{key}": text for key, text in texts.items() if known.get(key, text) != text}
    tags |= {"oxrl.directory": str(directory), "oxrl.version": environment["packages"].get("oxrl")}
    git = environment.get("git") or {}
    tags |= {"mlflow.source.git.commit": git.get("commit"), "git.dirty": git.get("dirty")}
    client.log_batch(
        run.info.run_id,
        params=[Param(key, text) for key, text in texts.items() if key not in known],
        tags=[RunTag(key, str(value)) for key, value in tags.items() if value is not None],
    )
    return client, run.info.run_id, int(run.data.metrics.get("step", -1))


def read_new_steps(metrics: Path, offset: int, logged: int) -> tuple[list[dict[str, Any]], int]:
    """Complete lines of `metrics` from byte `offset` whose step is above `logged`, and the offset
    to go on from.
    """
    if not metrics.exists() or not line_starts_at(metrics, offset):
        offset = 0  # the run went back to a checkpoint and cut the file; what is logged already is skipped
    records: list[dict[str, Any]] = []
    for record, end in read_records_from(metrics, offset):
        offset = end
        if record["step"] > logged:
            records.append(record)
    return records, offset


def mlflow_name(key: str) -> str:
    """`key` in the letters that MLflow allows in a metric's name: eval/pass@1 becomes
    eval/pass_at_1.
    """
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))


if __name__ == "__main__":
    os.nice(10)  # training goes first
    mirror(Path(sys.argv[1]), int(sys.argv[2]))
