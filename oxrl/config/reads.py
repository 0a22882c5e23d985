"""Which fields a run reads, as their lines say, and its YAML, resolved to those.

A field that is written down but not read is refused: a knob that turns nothing must not look as if
it did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import cast

from oxrl.config.conditions import SENTENCES, has_reference_model
from oxrl.config.field import Condition, Recipes, Section, about
from oxrl.config.schema import FIELDS, Config, FieldValues, GivenValues
from oxrl.config.sections.train import CELLS
from oxrl.flat_config import differences
from oxrl.redact import without_tokens
from oxrl.tables.cells import CELLS as TABLE
from oxrl.tables.cells import CRITIC, FEATURES
from oxrl.tables.numbers import AnyNumber
from oxrl.tables.policy import ROWS, Row

# What a field needs and a run has not: a condition that holds, one of some recipes, or a row that
# reads its number.
Unmet = Condition | Recipes | AnyNumber
Verdicts = Mapping[Condition, bool | None]


def row_fields(row: Row) -> frozenset[str]:
    """Dotted `train.*` paths that the cells and features of `row` read."""
    return frozenset(f"train.{name}" for name in row.defaults)


def models_trained(cfg: Config) -> int:
    """Count the models of the policy's size that training builds: with a critic and a reference."""
    return 1 + cfg.train.row.has(CRITIC) + has_reference_model(cfg)


def can_read(recipe: str, path: str) -> bool:
    """Whether some algorithm of a recipe reads a field."""
    field = about(FIELDS[path])
    whole = about(Config.model_fields[path.partition(".")[0]])
    known = field.number is None or field.number.key in numbers_of(recipe)
    return known and recipe in whole.of and recipe in field.of


@cache
def numbers_of(recipe: str) -> frozenset[str]:
    """Fields of the numbers of the tables that a recipe can read."""
    read = {name for row in ROWS.values() if row.recipe == recipe for name in row.defaults}
    if recipe == "rl":
        parts = (*TABLE.values(), *FEATURES.values())
        read |= {number.key for part in parts for number in part.numbers}
    return frozenset(read)


def resume_rules() -> dict[str, str]:
    """What becomes of a run that is resumed with another value: by dotted path, or by section where
    that is said of all of it (see `Resume`); what is not there is fixed.
    """
    fields = {**Config.model_fields, **FIELDS}
    rules = {path: about(field).resume for path, field in fields.items()}
    return {path: rule for path, rule in rules.items() if rule != "fixed"}


def fields_read(cfg: Config) -> frozenset[str]:
    """Dotted paths that training with `cfg` reads."""
    found = verdicts(cfg)
    return frozenset(path for path in FIELDS if unmet(path, cfg, found) is None)


def verdicts(cfg: Config) -> Verdicts:
    """What every condition says of a configuration, in their order."""
    return {condition: condition(cfg) for condition in SENTENCES}


def unmet(path: str, cfg: Config, found: Verdicts) -> Unmet | None:
    """The first thing that a field needs and a run has not; None where the field is read.

    Args:
        path: dotted, of the field.
        cfg: of the run.
        found: the verdicts on it.
    """
    section, _, name = path.partition(".")
    field = FIELDS[path]
    own = about(field)
    whole = about(Config.model_fields[section])
    for condition, holds in found.items():
        if condition not in whole.when and condition not in own.when:
            continue
        if holds is None:
            holds = getattr(getattr(cfg, section), name) != field.default
        if not holds:
            return condition
    for recipes in (whole.of, own.of):
        if cfg.recipe not in recipes:
            return recipes
    if own.number is None or name in cfg.train.row.defaults:
        return None
    return own.number


def read_values(cfg: Config) -> FieldValues:
    """Dotted path -> value of every field that is read, in the order of the schema; unset cells are
    left out.
    """
    read = fields_read(cfg)
    found: FieldValues = {}
    for path in FIELDS:
        section, _, name = path.partition(".")
        if path not in read:
            continue
        value = getattr(getattr(cfg, section), name)
        unset = section == "train" and name in CELLS and value is None
        if not unset:
            found[path] = _plain(value)
    return found


def sections_of(values: GivenValues) -> dict[str, FieldValues]:
    """Values by dotted path as YAML has them: section -> field -> value."""
    sections: dict[str, FieldValues] = {}
    for path, value in values.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def _plain(value: object) -> object:
    """A value as YAML has it: the parts of a reward as mappings, without what they leave open."""
    if not isinstance(value, dict):
        return value
    parts = cast(FieldValues, value)
    return {
        name: part.model_dump(exclude_none=True) if isinstance(part, Section) else part
        for name, part in parts.items()
    }


def dump_config(cfg: Config) -> str:
    """YAML text of the resolved configuration; loading it gives an equal object.

    Only what looks like a secret in a value becomes ***: the text is shown and kept.
    """
    lines: list[str] = []
    started = ""
    for path, value in read_values(cfg).items():
        section, _, name = path.partition(".")
        if section != started:
            lines.append(f"{section}:\n")
            started = section
        lines.append(f"  {name}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    """One YAML value that YAML 1.1 and 1.2 readers agree on."""
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    # JSON is YAML, apart from characters in strings that YAML wants escaped and JSON does not.
    text = without_tokens(json.dumps(value, ensure_ascii=False))
    return re.sub(
        "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text
    )


def config_diff(a: Config, b: Config) -> dict[str, tuple[object, object]]:
    """Dotted path -> (value in `a`, value in `b`) where they differ; `(not read)` where only one
    reads the field.
    """
    return differences(read_values(a), read_values(b), absent="(not read)")
