"""Writing a configuration back: YAML of the fields that are read, JSON schema, difference of two."""

from __future__ import annotations

import json
import re
from typing import Any

from oxrl.config.reads import fields_read
from oxrl.config.schema import CELLS, SECTIONS, Config
from oxrl.runs.directory import differences


def read_values(cfg: Config) -> dict[str, Any]:
    """Dotted path -> value of every field that is read, in the order of the schema; unset cells are left out."""
    read = fields_read(cfg)
    return {
        f"{section}.{name}": value
        for section in SECTIONS
        for name, value in getattr(cfg, section)
        if f"{section}.{name}" in read and not (section == "train" and name in CELLS and value is None)
    }


def dump_config(cfg: Config) -> str:
    """YAML text of the resolved configuration; loading it gives an equal object."""
    lines: list[str] = []
    current = ""
    for path, value in read_values(cfg).items():
        section, _, name = path.partition(".")
        if section != current:
            lines.append(f"{section}:")
            current = section
        lines.append(f"  {name}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    """One YAML value that YAML 1.1 and 1.2 readers agree on."""
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if isinstance(value, str):
        # JSON strings are YAML, apart from characters that YAML wants escaped and JSON does not.
        text = json.dumps(value, ensure_ascii=False)
        return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return json.dumps(value)


def config_schema() -> dict[str, Any]:
    """JSON schema of the YAML file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def config_diff(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> (value in `a`, value in `b`) where they differ; `(not read)` where only one reads the field."""
    return differences(read_values(a), read_values(b), absent="(not read)")
