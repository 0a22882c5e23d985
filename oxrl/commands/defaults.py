"""The value that each field of a recorded configuration has where nobody sets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticUndefined

from oxrl.config.schema import FIELDS
from oxrl.tables.policy import ROWS

REQUIRED = "none: it has to be given"


def defaults_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default of every field of a configuration; the row of its algorithm has some.

    Args:
        config: field -> value, as a run recorded it.
    """
    row = ROWS.get(str(config.get("train.alg_name")))
    of_row = {} if row is None else {f"train.{key}": value for key, value in row.defaults.items()}
    found: dict[str, Any] = {}
    for path in config:
        default = FIELDS[path].default if path in FIELDS else None
        default = of_row.get(path, default)
        found[path] = REQUIRED if default is PydanticUndefined else default
    return found
