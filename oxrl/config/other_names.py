"""What fields of other libraries are called here, for errors about names that nobody knows, and to
write their configurations as ours.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from oxrl.config.schema import FIELDS, GivenValues

# How others write that something is not set.
NOTHING = (None, "", -1, "none")


class Meant(NamedTuple):
    """The fields that names of another library stand for; other_names.toml says what each is."""

    names: list[str]
    fields: list[str]
    note: str = ""
    values: GivenValues = {}


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# By names as they are written there.
OTHER_NAMES: Mapping[str, Meant] = {
    name: Meant(**row) for row in TABLE["meant"] for name in row["names"]
}
# Rows of ours by a name that only such trainers have, the surest first.
TRAINED_BY: Mapping[str, str] = TABLE["trained_by"]


def meaning(path: str) -> Meant | None:
    """What a name of another library stands for here; None where it is not known.

    Args:
        path: as it is written there; of several dotted names as many of the last words as are
            known together, or all that are below a name with its own meaning.
    """
    words = path.lower().split(".")
    for first in range(len(words)):
        below = OTHER_NAMES.get(f"{words[first]}.*")
        meant = OTHER_NAMES.get(".".join(words[first:]), below)
        if meant is not None:
            return meant
    return None


def translated(path: str, value: object) -> tuple[list[str], object]:
    """The fields of ours that a value of another library belongs to, and the value there.

    Args:
        path: its name there, or one of ours in another section.

    Returns:
        No field where that is not known, where nothing is set, or where more than another name is
        needed.
    """
    last = path.rpartition(".")[2]
    meant = meaning(path) or Meant([], [field for field in FIELDS if field.endswith(f".{last}")])
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    mapped = meant.values.get(str(value).lower())
    if mapped is not None:
        return meant.fields[:1], mapped
    unclear = meant.note or (not meant.names and len(meant.fields) > 1)
    if unclear or value in NOTHING or isinstance(value, list):
        return [], value
    return meant.fields, value


def meant_by(name: str) -> str:
    """What a name of another library is here, to be added to an error; empty where none is known.

    Args:
        name: with its sections or without them.
    """
    meant = meaning(name)
    if meant is None:
        return ""
    fields = " or ".join(meant.fields)
    parts = [f"that is {fields} here"] if fields else []
    if meant.note:
        parts.append(meant.note)
    return f"; {': '.join(parts)}"
