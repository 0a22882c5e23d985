"""The facts of a report on one run, as JSON values, read from its directory alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from oxrl.commands.defaults import defaults_of
from oxrl.errors import RunDirectoryError
from oxrl.flat_config import recorded_config
from oxrl.modelfiles.dims import vocabulary_of
from oxrl.redact import masked
from oxrl.runs.checkpoints import CHECKPOINTS, CONTRACT_FILE, is_run, list_checkpoints
from oxrl.runs.files import CHAIN_FIELD, Json, json_safe, read_json, read_numbers, read_records
from oxrl.runs.health import verdicts
from oxrl.tables.engines import KEPT_CACHES

# Digits that a curve shows.
DIGITS = 6


def run_facts(directory: Path) -> Json:
    """Configuration, environment, starts and health of a run, and its metrics by columns.

    Raises:
        RunDirectoryError: no run is there, or its record is not what was written.
    """
    if not is_run(directory):
        raise RunDirectoryError(f"{directory} is no run directory: it has no config.yaml of a run")
    config = recorded_config(directory)
    lines = list(read_numbers(directory / "metrics.jsonl"))
    vocabulary = vocabulary_of(str(config.get("model.name", "")))
    wanted = config.get("run.health")
    checks = verdicts(lines, vocabulary, wanted if isinstance(wanted, dict) else {})
    return {
        "name": str(config.get("run.name", directory.name)),
        "finished": read_json(directory / "result.json") is not None,
        "config": list(config_rows(config)),
        "environment": [*environment_rows(machine_facts(directory))],
        "starts": [start_row(start) for start in read_records(directory / "starts.jsonl")],
        "checkpoints": [step for step, _ in list_checkpoints(directory / CHECKPOINTS)],
        "health": [verdict._asdict() for verdict in checks],
        "notes": [KEPT_CACHES] if config.get("rollout.swap") == "keep" else [],
        "metrics": columns_of(lines),
    }


def config_rows(config: Mapping[str, Any]) -> Iterator[list[Any]]:
    """[field, value, default] of every field; the default is null where it is what was set."""
    defaults = defaults_of(config)
    for path, value in config.items():
        default = defaults[path]
        told = None if default == value else _text(default)
        yield [path, _text(value), told]


def machine_facts(directory: Path) -> Json:
    """The notes of a run on its machine, and in its newest checkpoint on the bits that it computes.

    Args:
        directory: of the run.
    """
    facts = read_json(directory / "environment.json") or {}
    newest = list_checkpoints(directory / CHECKPOINTS)[-1:]
    contract = read_json(newest[0][1] / CONTRACT_FILE) if newest else None
    return facts if contract is None else {**facts, "exact": contract}


def environment_rows(environment: Json, prefix: str = "") -> Iterator[list[str]]:
    """[name, value] of everything that a run noted of its machine."""
    for name, value in environment.items():
        if isinstance(value, dict):
            yield from environment_rows(value, f"{prefix}{name}.")
        else:
            yield [f"{prefix}{name}", _text(value)]


def start_row(start: Json) -> Json:
    """The time at which a run was started or went on, and what had been changed by then."""
    told: list[str] = []
    for kind in ("config_changes", "input_changes"):
        found = start.get(kind)
        changes = found.items() if isinstance(found, dict) else ()
        told += [f"{name}: {_text(change)}" for name, change in changes]
    return {"time": start.get("time"), "resuming": start.get("resuming"), "changes": told}


def columns_of(lines: list[Json]) -> dict[str, list[float | None]]:
    """Metric -> its value in every line; null where the line has none, or none that is finite."""
    columns: dict[str, list[float | None]] = {}
    for place, line in enumerate(lines):
        for name, value in line.items():
            number = float(value)
            if name != CHAIN_FIELD and math.isfinite(number):
                column = columns.setdefault(name, [None] * len(lines))
                column[place] = float(f"{number:.{DIGITS}g}")
    return columns


def _text(value: object) -> str:
    """A value in words, with nothing in it that is secret."""
    safe = json_safe(value)
    return masked(safe if isinstance(safe, str) else json.dumps(safe, ensure_ascii=False))
