"""What the config.yaml of a run comes to today, where an earlier oxRL wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from oxrl.config.reads import read_values
from oxrl.config.schema import Config


def completed(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in fields that did not exist when a config was written with what they default to in it.

    Args:
        recorded: dotted path -> value, of a run directory.
        now: the same of the config that it is compared with.

    Returns:
        `recorded` and those fields of `now` that it lacks and its run would read today. Unchanged
        where today's oxRL refuses what is there: then every difference is told as it is.
    """
    sections: dict[str, dict[str, Any]] = {}
    for path, value in recorded.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    try:
        today = read_values(Config.model_validate(sections))
    except ValidationError:
        return dict(recorded)
    later = {path: today[path] for path in now if path in today and path not in recorded}
    return {**recorded, **later}
