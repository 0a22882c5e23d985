"""Overrides, `section.field=value` and `~section.field`, entered into what a file says."""

from __future__ import annotations

from collections.abc import Sequence

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from oxrl.config.names import unknown_section
from oxrl.config.schema import SECTIONS
from oxrl.config.source import Source, compose, enter, mapping, plain, value_of
from oxrl.errors import ConfigError
from oxrl.flat_config import PARTS


def apply_overrides(source: Source, overrides: Sequence[str]) -> None:
    """Enter overrides, in order; what is wrong with one becomes a problem of the source."""
    for override in overrides:
        path = override.partition("=")[0].strip().removeprefix("~")
        place = f"override '{override}'"
        if "." in path:
            source.where[path] = place
        try:
            _apply_override(override, path, source)
        except ValueError as error:
            source.wrong(path, str(error), place)


def _apply_override(override: str, path: str, source: Source) -> None:
    """`section.field=value` sets, `~section.field` takes back what the file says.

    Raises:
        ValueError: it does neither.
    """
    _, equals, text = override.partition("=")
    section, dot, name = path.partition(".")
    if path.startswith(f"{PARTS}."):
        _override_part(override, path, text, source)
    elif override.startswith("~"):
        if equals or not (source.written(path) or path in source.foreign):
            raise ValueError(
                "takes back a field that the file sets: "
                "write ~section.field, naming one that is there"
            )
        source.foreign.pop(path, None)
        source.values.get(section, {}).pop(name, None)
        source.taken_back.add(path)
    elif not equals or (section in SECTIONS and not dot):
        raise ValueError("an override is written section.field=value")
    elif section not in SECTIONS:
        raise ValueError(unknown_section(path))
    else:
        enter(path, value_of(path, _override_node(text), source), source)


def _override_node(text: str) -> Node:
    """Parse the value that an override gives a field.

    Raises:
        ConfigError: it is no YAML.
    """
    try:
        return compose(text, "") or ScalarNode("tag:yaml.org,2002:null", "")
    except ConfigError as error:
        why = str(error).lstrip(":1 ")
        raise ConfigError(f"{why}; quote the value if it is text") from None


def _override_part(override: str, path: str, text: str, source: Source) -> None:
    """`reward.parts.part.field=value`, `reward.parts.part={...}`, or `~` and one of these paths.

    Raises:
        ValueError: there is no such part, or nothing to take back.
    """
    parts = source.values.setdefault("reward", {}).setdefault("parts", {})
    part, _, name = path.removeprefix(f"{PARTS}.").partition(".")
    holder = parts
    if name and isinstance(parts, dict):
        holder = parts.get(part)
    key = name or part
    if not isinstance(holder, dict) or not key:
        raise ValueError(
            "reward.parts has no such part: write reward.parts.PART={name: math}, or its fields"
        )
    if not override.startswith("~"):
        node = _override_node(text)
        if isinstance(node, MappingNode):
            holder[key] = mapping(path, node, source, depth=1)
        else:
            holder[key] = plain(node)
    elif key in holder:
        del holder[key]
    else:
        raise ValueError("takes back what the file sets: name a part or field there")
