"""trackio: one SQLite file in RUN/trackio, unless TRACKIO_DIR names another folder.

Its `init` would start a server; what it stores is written without one.

    TRACKIO_DIR=runs/my-run/trackio trackio show --project oxrl
"""

from __future__ import annotations

import os

from oxrl.runs.files import Json
from oxrl.runs.tracker_process import Place, TrackedRun, numbers

PROJECT = "oxrl"


class TrackioTracker(Place):
    """See `oxrl.runs.tracker_process.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run.directory / "trackio.json")
        os.environ.setdefault("TRACKIO_DIR", str(run.directory / "trackio"))
        # Imported after that: it reads the variable when it is imported.
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        self._storage = SQLiteStorage
        self._run = run

    def log(self, records: list[Json]) -> None:
        steps = [int(record["step"]) for record in records]
        self._storage.bulk_log(
            PROJECT,
            self._run.name,
            [numbers(record) for record in records],
            steps=steps,
            config=self._run.params,
            # What was written before a kill is not written twice.
            log_ids=[f"{self.run_id}-{step}" for step in steps],
            run_id=self.run_id,
        )
        self.note(steps[-1])

    def close(self, outcome: str) -> None:
        pass  # nothing is held open, and trackio has no word for it
