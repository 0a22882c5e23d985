"""Weights & Biases: RUN/wandb, to be sent by `wandb sync`, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os

import wandb  # pyright: ignore[reportMissingImports]

from oxrl.runs.files import Json
from oxrl.runs.tracker_process import Place, TrackedRun, numbers

PROJECT = "oxrl"


class WandbTracker(Place):
    """See `oxrl.runs.tracker_process.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run.directory / "wandb.json")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=self.run_id,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),  # pyright: ignore[reportArgumentType]
            dir=str(run.directory),
            config={**run.params, "environment": run.environment},
        )
        self.note(self.logged)

    def log(self, records: list[Json]) -> None:
        for record in records:
            self._run.log(numbers(record), step=record["step"])
        self.note(records[-1]["step"])

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == "FINISHED" else 1)
