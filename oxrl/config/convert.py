"""`oxrl config convert`: a configuration of TRL, verl or a relative, written as ours."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

from oxrl.config.load import load_source
from oxrl.config.other_names import TRAINED_BY, meant_by, translated
from oxrl.config.source import Source, read_source
from oxrl.errors import ConfigError
from oxrl.tables.policy import ROWS

GENERATIONS = 8  # of TRL, per prompt, where the file says nothing


def converted(path: Path) -> str:
    """A configuration of another library as YAML of ours.

    Args:
        path: YAML with nested sections, as of verl, or with names of arguments, as of TRL.

    Returns:
        Our sections, each field with the name that it had; then, as comments, what has no
        counterpart, and what is missing or wrong before it can be loaded.

    Raises:
        ConfigError: the file cannot be read, or is no YAML.
    """
    theirs = read_source(path, ())
    given = {name.rpartition(".")[2]: value for name, value in theirs.foreign.items()}
    row = next((row for name, row in TRAINED_BY.items() if name in given), "sft")
    ours = Source(f"what {path.name} becomes", theirs.values)
    _set(ours, "run.name", path.stem, "the name of the file")
    _set(ours, "train.alg_name", row, "a guess by the names in the file")
    recipe = ROWS[row].recipe
    batch = "data.prompts_per_step" if recipe == "rl" else "data.rows_per_step"
    _set(ours, batch, _batch(given, recipe), "of a whole step")
    left: list[str] = []
    for name, value in theirs.foreign.items():
        fields, found = translated(f"{recipe}.{name}", value)
        for field in fields:
            _set(ours, field, found, name)
        if not fields:
            why = meant_by(name) or "; no counterpart"
            left.append(f"{name} = {json.dumps(value, default=str)}{why}")
    return _text(ours, left)


def _set(ours: Source, field: str, value: object, was: str) -> None:
    """Give a field of ours a value, where there is one; `was` is the name that it had."""
    section, _, name = field.partition(".")
    if value is not None:
        ours.values.setdefault(section, {})[name] = value
        ours.where[field] = was


def _batch(given: Mapping[str, object], recipe: str) -> int | None:
    """Prompts or rows of an optimizer step; None where the file does not say.

    Args:
        given: its values, by the last words of their names.
        recipe: rl: rows are responses there, several to a prompt.
    """
    known = {name: value for name, value in given.items() if isinstance(value, int)}
    rows = known.get("per_device_train_batch_size", 0) * known.get("gradient_accumulation_steps", 1)
    if recipe == "rl":
        rows //= known.get("num_generations") or GENERATIONS
    return known.get("train_batch_size") or rows or None


def _text(ours: Source, left: list[str]) -> str:
    """The YAML of our sections, and comments about the rest."""
    lines: list[str] = []
    for section, fields in ours.values.items():
        lines.append(f"{section}:")
        for name, value in fields.items():
            was = " ".join(ours.where.get(f"{section}.{name}", "").split())
            lines.append(f"  {name}: {json.dumps(value, default=str)}  # {was}")
    comments = ["Not translated, and its defaults neither:", *left]
    try:
        with warnings.catch_warnings(action="ignore"):
            load_source(ours)
    except ConfigError as error:
        comments += ["", "Before it can be loaded:", *str(error).splitlines()]
    return "\n".join([*lines, "", *(f"# {' '.join(line.split())}" for line in comments)])
