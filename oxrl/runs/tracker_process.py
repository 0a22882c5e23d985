"""The process of a tracker: it follows metrics.jsonl until the run ends.

It is started as `python -m oxrl.runs.tracker_process TRACKER RUN_DIRECTORY PID`.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

from oxrl.entry_points import own_offers
from oxrl.flat_config import flatten_config
from oxrl.runs.files import (
    CHAIN_FIELD,
    Json,
    line_starts_at,
    lock_file,
    pretty_json,
    read_json,
    read_records_from,
    write_atomically,
)
from oxrl.types import Metrics

# Entry points: functions that begin to show a run, or go on with one that was shown before, under
# its id.
GROUP = "oxrl.trackers"
POLL_S = 5.0


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that a tracker is given.

    params: dotted path -> value of the config. environment: what the first start ran on.
    """

    directory: Path
    name: str
    params: Json
    environment: Json


class Tracker(Protocol):
    """A service that shows a run. `logged`: the newest step that it has, -1 for none."""

    logged: int

    def log(self, records: list[Json]) -> None:
        """Show lines of metrics.jsonl that are newer than `logged`."""

    def close(self, outcome: str) -> None:
        """Show how the run ended: FINISHED, FAILED or KILLED."""


def tracked_run(directory: Path) -> TrackedRun:
    """Read what a run directory says of its run."""
    params = flatten_config((directory / "config.yaml").read_text(encoding="utf-8"))
    environment = read_json(directory / "environment.json") or {}
    name = str(params.get("run.name", directory.name))
    return TrackedRun(directory, name, params, environment)


def follow(name: str, directory: Path, run_pid: int) -> None:
    """Show a run in a tracker until standard input closes.

    Args:
        name: of the tracker.
        directory: of the run.
        run_pid: the process that writes the record; without it this one ends too.
    """
    open_tracker: Callable[[TrackedRun], Tracker] = resolve_name(own_offers(GROUP)[name])
    # The mirror of a killed run may still be catching up when the resumed run starts its own.
    with lock_file(directory / f".{name}.json.lock", fcntl.LOCK_EX):
        tracker = open_tracker(tracked_run(directory))
        offset = 0
        closed = False
        orphaned = False
        while not (closed or orphaned):
            closed = bool(select.select([sys.stdin], [], [], POLL_S)[0])
            # Workers that the run forked may hold the pipe open after the run itself was killed.
            orphaned = os.getppid() != run_pid
            metrics = directory / "metrics.jsonl"
            records, offset = read_new_steps(metrics, offset, tracker.logged)
            if records:
                tracker.log(records)
        said = sys.stdin.read().strip() if closed else ""
        tracker.close(said or "KILLED")


def read_new_steps(metrics: Path, offset: int, logged: int) -> tuple[list[Json], int]:
    """Read the lines that were added to `metrics` and are not logged yet.

    Args:
        metrics: a run's metrics.jsonl.
        offset: the byte that the last reading ended at.
        logged: the last step that the tracker has.

    Returns:
        The records, and the offset to go on from.
    """
    if not metrics.exists() or not line_starts_at(metrics, offset):
        offset = 0  # the run went back to a checkpoint and cut the file; logged steps are skipped
    records: list[Json] = []
    for record, end in read_records_from(metrics, offset):
        offset = end
        if record["step"] > logged:
            records.append(record)
    return records, offset


def numbers(record: Json) -> Metrics:
    """Return the metrics of a line, without its step and the hash of the file."""
    others = ("step", CHAIN_FIELD)
    return {key: float(value) for key, value in record.items() if key not in others}


class Place:
    """RUN/<tracker>.json: under which id the tracker has this run, and up to which step. Trackers
    whose service does not tell them may inherit from it.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        known: Json = json.loads(path.read_bytes()) if path.exists() else {}
        self.run_id = str(known.get("run_id", uuid.uuid4().hex[:16]))
        self.logged = int(known.get("logged", -1))

    def note(self, logged: int) -> None:
        """Remember that the tracker has everything up to a step."""
        self.logged = logged
        write_atomically(self._path, pretty_json({"run_id": self.run_id, "logged": logged}))


if __name__ == "__main__":
    os.nice(10)  # training goes first
    follow(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
