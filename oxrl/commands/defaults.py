"""The value that each field of a recorded configuration has where nobody sets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticUndefined

from oxrl.config import schema

REQUIRED = "none: it has to be given"


def defaults_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default of every field of a configuration; the row of its algorithm has some.

    Args:
        config: field -> value, as a run recorded it.
    """
    defaults = schema.defaults_of(str(config.get("train.alg_name")))
    found = {path: defaults.get(path) for path in config}
    return {path: REQUIRED if at is PydanticUndefined else at for path, at in found.items()}
