"""What a report says of one run, as JSON values, read from its directory alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from oxrl.config.dims import vocabulary_of
from oxrl.config.schema import SECTIONS
from oxrl.errors import RunDirectoryError
from oxrl.runs.chain import FIELD as CHAIN_FIELD
from oxrl.runs.checkpoint import list_checkpoints
from oxrl.runs.directory import is_run, recorded_config
from oxrl.runs.files import Json, json_safe, read_json, read_numbers, read_records
from oxrl.runs.health import verdicts
from oxrl.shown import masked
from oxrl.tables.policy import ROWS

# Digits that a curve shows.
DIGITS = 6
WHOLE_STEP = "time/step_s"


def run_facts(directory: Path) -> Json:
    """Configuration, environment, starts, health and phases of a run, and its metrics by columns.

    Raises:
        RunDirectoryError: no run is there, or its record is not what was written.
    """
    if not is_run(directory):
        raise RunDirectoryError(f"{directory} is no run directory: it has no config.yaml of a run")
    config = recorded_config(directory)
    lines = list(read_numbers(directory / "metrics.jsonl"))
    vocabulary = vocabulary_of(str(config.get("model.name", "")))
    wanted = config.get("run.health")
    wanted = wanted if isinstance(wanted, dict) else {}
    checks = [verdict._asdict() for verdict in verdicts(lines, vocabulary, wanted)]
    result = read_json(directory / "result.json")
    return {
        "name": str(config.get("run.name", directory.name)),
        "path": str(directory),
        "algorithm": config.get("train.alg_name"),
        "finished": result is not None,
        "wanted": config.get("run.steps"),
        "config": list(config_rows(config)),
        "environment": list(environment_rows(read_json(directory / "environment.json") or {})),
        "starts": [start_row(start) for start in read_records(directory / "starts.jsonl")],
        "checkpoints": [step for step, _ in list_checkpoints(directory / "checkpoints")],
        "health": checks,
        "phases": phases(lines),
        "metrics": columns_of(lines),
    }


def config_rows(config: Mapping[str, Any]) -> Iterator[list[Any]]:
    """[field, value, default] of every field; the default is null where it is what was set."""
    row = ROWS.get(str(config.get("train.alg_name")))
    of_row: Mapping[str, Any] = {} if row is None else row.defaults
    for path, value in config.items():
        section, _, name = path.partition(".")
        model = SECTIONS.get(section)
        field = None if model is None else model.model_fields.get(name)
        default = None if field is None else field.default
        if section == "train" and name in of_row:
            default = of_row[name]
        if default is PydanticUndefined:
            yield [path, masked(_text(value)), "none: it has to be given"]
        elif default == value:
            yield [path, masked(_text(value)), None]
        else:
            yield [path, masked(_text(value)), _text(default)]


def environment_rows(environment: Json, prefix: str = "") -> Iterator[list[str]]:
    """[name, value] of everything that a run noted of its machine."""
    for name, value in environment.items():
        if isinstance(value, dict):
            yield from environment_rows(value, f"{prefix}{name}.")
        else:
            yield [f"{prefix}{name}", masked(_text(value))]


def start_row(start: Json) -> Json:
    """When a run was started or went on, and what was another then."""
    changes: Json = {}
    for kind in ("config_changes", "input_changes"):
        found = start.get(kind)
        changes |= found if isinstance(found, dict) else {}
    told = [f"{name}: {masked(_text(change))}" for name, change in changes.items()]
    return {"time": start.get("time"), "resuming": start.get("resuming"), "changes": told}


def phases(lines: list[Json]) -> list[list[Any]]:
    """[phase, mean seconds per step, share of the step] of what was timed."""
    seconds: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("time/"):
                seconds.setdefault(name, []).append(float(value))
    # A phase that was not in a step took no time in it.
    means = {name: math.fsum(found) / max(1, len(lines)) for name, found in seconds.items()}
    whole = means.get(WHOLE_STEP, 0.0)
    rows = sorted(means.items(), key=lambda pair: -pair[1])
    return [[name, mean, mean / whole if whole else None] for name, mean in rows]


def columns_of(lines: list[Json]) -> dict[str, list[float | str | None]]:
    """Metric -> its value in every line; null where the line has none."""
    names: dict[str, None] = {}
    for line in lines:
        names |= dict.fromkeys(line)
    names.pop(CHAIN_FIELD, None)
    columns: dict[str, list[float | str | None]] = {}
    for name in names:
        columns[name] = [_number(line.get(name)) for line in lines]
    return columns


def _number(value: object) -> float | None:
    """A number as a curve shows it; one that is not finite leaves a gap."""
    if value is None:
        return None
    number = float(value)  # pyright: ignore
    if not math.isfinite(number):
        return None
    return float(f"{number:.{DIGITS}g}")


def _text(value: object) -> str:
    safe = json_safe(value)
    return safe if isinstance(safe, str) else json.dumps(safe, ensure_ascii=False)
