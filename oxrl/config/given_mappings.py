"""A configuration that a program holds as mappings, as if a file had said it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, cast

from oxrl.config.names import unknown_section
from oxrl.config.overrides import apply_overrides
from oxrl.config.schema import SECTIONS
from oxrl.config.source import Source, enter
from oxrl.flat_config import PARTS


def mapping_source(name: str, given: Mapping[Any, Any], overrides: Sequence[str]) -> Source:
    """Make a source, as of a file, from sections and fields that a program holds as mappings.

    Args:
        name: where they come from, for errors.
        given: section -> field -> value, as a file would say it.
        overrides: `section.field=value` or `~section.field`, in order.
    """
    source = Source(file=name)
    for section, fields in given.items():
        if section not in SECTIONS:
            source.wrong(str(section), unknown_section(str(section)), name)
        elif isinstance(fields, Mapping):
            values = cast(Mapping[object, object], fields)
            for field_name, value in values.items():
                _take(f"{section}.{field_name}", value, source)
        elif fields is not None:
            source.wrong(section, "is a section and holds fields, not a value", name)
    apply_overrides(source, overrides)
    return source


def _take(path: str, value: object, source: Source) -> None:
    """One field as a program says it: of the kinds that a file could say."""
    try:
        repr(value)  # refuses a number of too many digits, as `plain` does
        enter(path, _plain(value, depth=1 + (path == PARTS)), source)
    except ValueError as error:
        source.wrong(path, str(error), source.file)


def _plain(value: object, *, depth: int) -> object:
    """A value with paths as text, and mappings by their keys as text where they are that deep."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping) and depth:
        given = cast(Mapping[object, object], value)
        return {str(key): _plain(item, depth=depth - 1) for key, item in given.items()}
    return value
