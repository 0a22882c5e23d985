"""Values that are given otherwise than by a file: overrides, `section.field=value` and
`~section.field`, and the mappings of a program, as if a file had said them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oxrl.config.names import unknown_section
from oxrl.config.schema import SECTIONS
from oxrl.config.source import Source, compose, enter, take, value_of
from oxrl.errors import ConfigError
from oxrl.flat_config import PARTS, named_in


def mapping_source(name: str, given: Mapping[Any, Any], overrides: Sequence[str]) -> Source:
    """Make a source, as of a file, from sections and fields that a program holds as mappings.

    Args:
        name: where they come from, for errors.
        given: section -> field -> value, as a file would say it.
        overrides: `section.field=value` or `~section.field`, in order.
    """
    source = Source(file=name)
    take(given, source)
    apply_overrides(source, overrides)
    return source


def apply_overrides(source: Source, overrides: Sequence[str]) -> None:
    """Enter overrides, in order; what is wrong with one becomes a problem of the source."""
    for override in overrides:
        path = override.partition("=")[0].strip().removeprefix("~")
        place = f"override '{override}'"
        if "." in path:
            source.where[path] = place
        try:
            if named_in(path):
                _override_named(override, path, source)
            else:
                _override_field(override, path, source)
        except ValueError as error:
            source.wrong(path, str(error), place)


def _override_field(override: str, path: str, source: Source) -> None:
    """`section.field=value` sets, `~section.field` takes back what the file says.

    Raises:
        ValueError: it does neither.
    """
    section, dot, _ = path.partition(".")
    if override.startswith("~"):
        if "=" in override or not (path in source.values or path in source.foreign):
            raise ValueError(
                "takes back a field that the file sets: "
                "write ~section.field, naming one that is there"
            )
        source.foreign.pop(path, None)
        source.values.pop(path, None)
        if path == "data.eval":  # switches evaluation off, whatever else says how it is done
            source.values[path] = None
    elif "=" not in override or (section in SECTIONS and not dot):
        raise ValueError("an override is written section.field=value")
    elif section not in SECTIONS:
        raise ValueError(unknown_section(path))
    else:
        enter(path, _given_value(override, path, source), source)


def _override_named(override: str, path: str, source: Source) -> None:
    """`reward.parts.part.field=value`, `reward.parts.part={...}`, or `~` and one of these paths;
    and so for every field of mappings.

    Raises:
        ValueError: there is no such part, or nothing to take back.
    """
    field = named_in(path)
    parts = source.values.setdefault(field, {})
    part, _, name = path.removeprefix(f"{field}.").partition(".")
    holder = parts
    if name and isinstance(parts, dict):
        holder = parts.get(part)
    key = name or part
    if not isinstance(holder, dict) or not key:
        if field == PARTS:
            raise ValueError(
                "reward.parts has no such part: write reward.parts.PART={name: math}, or its fields"
            )
        raise ValueError(f"{field} has none of that name: write {field}.NAME={{name: MODEL}}")
    if not override.startswith("~"):
        holder[key] = _given_value(override, path, source)
    elif key in holder:
        del holder[key]
    else:
        raise ValueError("takes back what the file sets: name a part or field there")


def _given_value(override: str, path: str, source: Source) -> object:
    """The value behind the first `=` of an override.

    Raises:
        ConfigError: it is no YAML.
        ValueError: it is no plain value.
    """
    try:
        node = compose(override.partition("=")[2], "")
    except ConfigError as error:
        raise ConfigError(f"{str(error).lstrip(':1 ')}; quote the value if it is text") from None
    if node is None:
        return None
    return value_of(path, node, source, source.where[path])
