"""Write docs/config.md from the schema: `make docs`. A test compares the two."""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from oxrl.config.field import Section
from oxrl.config.schema import SECTIONS

HEADER = """# Config reference

Generated from `oxrl/config/schema.py` by `make docs`; `oxrl config schema` prints the same
as JSON schema, `oxrl config show CONFIG` prints a config with every field that the run reads
filled in.

A field that the chosen algorithm does not read is an error when it is written down. "The
algorithm's" is the value in its row of the table, [algorithms.md](algorithms.md). Overrides on the
command line are `section.field=value`.
"""


def type_words(annotation: Any) -> str:
    """The type as a reader of YAML would say it: `float or null`, one word per choice."""
    if typing.get_origin(annotation) is typing.Annotated:
        return type_words(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(type_words(part) for part in typing.get_args(annotation))
    names = {
        types.NoneType: "null",
        str: "text",
        int: "integer",
        float: "number",
        bool: "true, false",
    }
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def default_words(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "null"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return (
        f"{field.default:g}"
        if isinstance(field.default, float)
        else str(field.default) or "(empty)"
    )


def reference() -> str:
    lines = [HEADER]
    for name, section in SECTIONS.items():
        lines += [
            f"## {name}",
            "",
            *table(section),
        ]
        for field_name, field in section.model_fields.items():
            for inner in typing.get_args(field.annotation):
                if isinstance(inner, type) and issubclass(inner, Section):
                    lines += [f"### {name}.{field_name}, each", "", *table(inner)]
    return "\n".join(lines)


def table(section: type[Section]) -> list[str]:
    """What a section is, and a row for each of its fields."""
    lines = [inspect.getdoc(section) or "", "", "| field | type | default | meaning |"]
    lines.append("|---|---|---|---|")
    for field_name, field in section.model_fields.items():
        meaning = (field.description or "").replace("|", "\\|").replace("<", "&lt;")
        cells = (f"`{field_name}`", type_words(field.annotation), default_words(field), meaning)
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    return lines


if __name__ == "__main__":
    Path(__file__).with_name("config.md").write_text(reference())
