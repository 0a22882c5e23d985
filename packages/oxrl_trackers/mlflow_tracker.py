"""MLflow: metrics, config, what the run read and wrote.

Without MLFLOW_TRACKING_URI in the environment everything stays under the run directory (mlflow.db,
artifacts) and nothing uses the network. No server is ever started.

Datasets are those of data.json, by hash. Every checkpoint is a model of MLflow's with the run as
its source, the hash of its manifest and the checkpoint before it; the model that the run began with
is named with its files' hashes.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.exceptions import MlflowException

from oxrl.runs.checkpoints import list_checkpoints
from oxrl.runs.files import Json, pretty_json, read_json, read_records, write_atomically
from oxrl.runs.tracker_process import TrackedRun, numbers
from oxrl_trackers.mlflow_names import hide_password, mlflow_name

EXPERIMENT = "oxrl"
DATABASE = "mlflow.db"
PARAM_LIMIT = 6000  # characters of one value, MLflow's own limit
BATCH_LIMIT = 1000  # metrics in one call, MLflow's own limit
DIGEST_LIMIT = 36  # characters of a dataset's digest, MLflow's own limit
TABLE_ROWS = 64  # newest samples that are shown as a table
SAMPLES = "samples.json"
SHOWN = ("step", "prompt", "response", "reward", "status", "advantage", "finish_reason", "answer")


class MLflowTracker:
    """See `oxrl.runs.tracker_process.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        address = hide_password(os.environ)
        self._directory = run.directory
        self._state = run.directory / "mlflow.json"
        self._start = str(run.params.get("model.name", ""))
        if not address:
            remove_unfinished(run.directory / DATABASE)
        self._client = MlflowClient(tracking_uri=address or f"sqlite:///{run.directory / DATABASE}")
        found = self._open(run.name, local=not address)
        self._id = found.info.run_id
        self._experiment = found.info.experiment_id
        self._describe(found, run)
        self.logged = int(found.data.metrics.get("step", -1))
        self._attached = True
        self._attach(self._add_inputs)

    def log(self, records: list[Json]) -> None:
        now_ms = int(time.time() * 1000)
        metrics: list[Metric] = []
        for record in records:
            step = record["step"]
            # "step" last: its latest value is where a later mirror of the run goes on.
            values = numbers(record) | {"step": float(step)}
            metrics += [Metric(mlflow_name(key), values[key], now_ms, step) for key in values]
        for start in range(0, len(metrics), BATCH_LIMIT):
            self._client.log_batch(self._id, metrics=metrics[start : start + BATCH_LIMIT])
        self.logged = records[-1]["step"]
        self._attach(self._add_checkpoints)

    def close(self, outcome: str) -> None:
        self._attach(self._add_checkpoints)
        self._attach(self._add_samples)
        self._client.set_terminated(self._id, status=outcome)

    def _open(self, name: str, *, local: bool) -> Run:
        """A new run of MLflow's, or the one that an earlier start made."""
        client = self._client
        if self._state.exists():
            run = client.get_run(json.loads(self._state.read_bytes())["run_id"])
            client.update_run(run.info.run_id, status="RUNNING")
            return run
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            # A server keeps artifacts where it wants them.
            artifacts = (self._directory / "artifacts").as_uri() if local else None
            experiment = client.create_experiment(EXPERIMENT, artifact_location=artifacts)
        else:
            experiment = found.experiment_id
        run = client.create_run(experiment, run_name=name)
        ids = {"run_id": run.info.run_id, "experiment_id": experiment}
        write_atomically(self._state, pretty_json(ids))
        return run

    def _describe(self, found: Run, run: TrackedRun) -> None:
        """Log the config as params, and what ran as tags."""
        git = run.environment.get("git") or {}
        tags: Json = {
            "oxrl.directory": run.directory,
            "oxrl.version": run.environment["packages"].get("oxrl"),
            "mlflow.source.git.commit": git.get("commit"),
            "git.dirty": git.get("dirty"),
        }
        new: list[Param] = []
        for key, value in run.params.items():
            text = str(value)[:PARAM_LIMIT]
            known = found.data.params.get(key)
            if known is None:
                new.append(Param(key, text))
            elif known != text:
                # A param cannot be changed in MLflow: what a resume changed (run.steps) becomes a
                # tag.
                tags[f"resumed.{key}"] = text
        noted = [RunTag(key, str(value)) for key, value in tags.items() if value is not None]
        self._client.log_batch(self._id, params=new, tags=noted)

    def _attach(self, add: Callable[[], None]) -> None:
        """Add what is nice to have; where the server takes none of it, metrics still go there."""
        if not self._attached:
            return
        try:
            add()
        except (MlflowException, OSError) as error:
            self._attached = False
            sys.stderr.write(f"nothing but metrics reaches MLflow: {error}\n")

    def _add_inputs(self) -> None:
        """Add what the run reads: its data by hash, its configuration, model and changed code."""
        datasets: list[DatasetInput] = []
        for name, digest in (read_json(self._directory / "data.json") or {}).items():
            short = str(digest)[:DIGEST_LIMIT]
            data = Dataset(name=Path(name).name, digest=short, source_type="local", source=name)
            datasets.append(DatasetInput(data, [InputTag("sha256", str(digest))]))
        self._client.log_inputs(self._id, datasets=datasets)
        for name in ("config.yaml", "environment.json", "inputs.json", "git.diff"):
            file = self._directory / name
            if file.is_file():
                self._client.log_artifact(self._id, str(file))

    def _add_checkpoints(self) -> None:
        """Every checkpoint that is not there yet, and what it came from."""
        known: Json = json.loads(self._state.read_bytes())
        models: Json = known.setdefault("checkpoints", {})
        for step, folder in list_checkpoints(self._directory / "checkpoints"):
            digest = seal_of(folder)
            if not digest or models.get(str(step), {}).get("sha256") == digest:
                continue
            before = [models[name]["sha256"] for name in models if int(name) < step]
            tags = {
                "oxrl.sha256": digest,
                "oxrl.parent": before[-1] if before else self._origin(),
                "oxrl.path": str(folder),
            }
            model = self._client.create_logged_model(
                self._experiment,
                name=folder.name,
                source_run_id=self._id,
                tags=tags,
                params={"step": str(step)},
                model_type="checkpoint",
            )
            self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
            self._client.log_outputs(self._id, [LoggedModelOutput(model.model_id, step)])
            models[str(step)] = {"sha256": digest, "model_id": model.model_id}
            write_atomically(self._state, pretty_json(known))

    def _origin(self) -> str:
        """The model that the run began with: the seal of a checkpoint, or its name and commit."""
        inputs = read_json(self._directory / "inputs.json") or {}
        model: Json | None = inputs.get("model.name")
        if model is None:
            return self._start
        seal = seal_of(Path(model["where"]))
        return seal or f"{model['where']} {model['commit'] or ''}".strip()

    def _add_samples(self) -> None:
        """The newest samples as a table."""
        newest = deque(read_records(self._directory / "samples.jsonl"), maxlen=TABLE_ROWS)
        if not newest:
            return
        rows = [[line.get(name) for name in SHOWN] for line in newest]
        table = {"columns": [*SHOWN], "data": rows}
        self._client.log_dict(self._id, table, SAMPLES)
        shown = json.dumps([{"path": SAMPLES, "type": "table"}])
        self._client.set_tag(self._id, "mlflow.loggedArtifacts", shown)


def remove_unfinished(database: Path) -> None:
    """Remove a database without a run: MLflow was ended while it made it, and cannot go on.

    One that cannot be read is left to MLflow, which says why.
    """
    if not database.is_file():
        return
    try:
        with closing(sqlite3.connect(database)) as found:
            made = found.execute("SELECT name FROM sqlite_master WHERE name = 'runs'").fetchall()
            if made and found.execute("SELECT * FROM runs LIMIT 1").fetchall():
                return
    except sqlite3.DatabaseError:
        return
    for file in database.parent.glob(f"{database.name}*"):
        file.unlink()


def seal_of(folder: Path) -> str:
    """The hash that a checkpoint's manifest has of itself; empty where there is none."""
    manifest = read_json(folder / "manifest.json") or {}
    return str(manifest.get("sha256", ""))
