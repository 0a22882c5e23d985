"""The values chosen for fields that say auto, noted in the run directory when a run begins.

choices.json   field of the config -> {"value": what it was taken for, "why": in words}

A run that goes on, and one that is replayed, does as is noted there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from oxrl.errors import RunDirectoryError
from oxrl.runs.files import Json, pretty_json, read_json, require_kind, write_atomically

CHOICES_FILE = "choices.json"


@dataclass(frozen=True)
class Choice:
    """A value that a field got, and why."""

    value: bool | int
    why: str


def noted_choice(run: Path, field: str) -> Choice | None:
    """Read the value that was chosen when the run began; None where nothing was.

    Args:
        run: its directory.
        field: of the config.

    Raises:
        RunDirectoryError: the file is not what was written there.
    """
    found = _read(run).get(field)
    return None if found is None else Choice(found["value"], found["why"])


def note_choice(run: Path, field: str, choice: Choice) -> None:
    """Note what was chosen; replaces what was noted.

    Args:
        run: its directory.
        field: of the config.
        choice: for it.
    """
    write_atomically(run / CHOICES_FILE, pretty_json(_read(run) | {field: asdict(choice)}))


def _read(run: Path) -> Json:
    path = run / CHOICES_FILE
    require_kind(path, folder=False)
    if not path.is_file():
        return {}
    found = read_json(path)
    if found is None or not all(map(_is_choice, found.values())):
        raise RunDirectoryError(
            f"{path} is not the JSON written there: restore it, or write into the configuration "
            "what each field in it was taken for, and delete it"
        )
    return found


def _is_choice(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"value", "why"}:
        return False
    return isinstance(value["value"], int) and isinstance(value["why"], str)
