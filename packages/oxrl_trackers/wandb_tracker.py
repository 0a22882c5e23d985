"""Weights & Biases: RUN/wandb, to be sent by `wandb sync`, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os

import wandb  # pyright: ignore[reportMissingImports]

from oxrl.runs.files import Json
from oxrl.runs.tracker_process import Place, TrackedRun, numbers

PROJECT = "oxrl"


class WandbTracker:
    """See `oxrl.runs.tracker_process.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        self._place = Place(run.directory / "wandb.json")
        self.logged = self._place.logged
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=self._place.run_id,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),  # pyright: ignore[reportArgumentType]
            dir=str(run.directory),
            config={**run.params, "environment": run.environment},
        )
        self._place.note(self.logged)

    def log(self, records: list[Json]) -> None:
        for record in records:
            self._run.log(numbers(record), step=record["step"])
        self.logged = records[-1]["step"]
        self._place.note(self.logged)

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == "FINISHED" else 1)
