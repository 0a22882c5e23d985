"""The fields that a run reads, as their lines say, and its YAML, resolved to those.

A field that is written down but not read is refused: a knob that turns nothing must not look as if
it did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from operator import attrgetter

from oxrl.config.conditions import SENTENCES
from oxrl.config.field import About, Condition, Recipes, Section, about
from oxrl.config.schema import (
    FIELDS,
    SECTIONS,
    Config,
    FieldValues,
    GivenValues,
    recipe_of,
)
from oxrl.config.sections.model import Teacher
from oxrl.config.sections.train import CELLS
from oxrl.flat_config import TEACHERS, differences
from oxrl.redact import without_tokens
from oxrl.tables.cells import CELLS as TABLE
from oxrl.tables.cells import FEATURES
from oxrl.tables.numbers import AnyNumber
from oxrl.tables.policy import ROWS

# What a field needs and a run has not: a condition that holds, one of some recipes, or a row that
# reads its number.
Unmet = Condition | Recipes | AnyNumber
Verdicts = Mapping[Condition, bool | None]


def can_read(recipe: str, path: str) -> bool:
    """True if some algorithm of a recipe reads a field."""
    section, field = declared(path)
    known = field.number is None or field.number.key in numbers_of(recipe)
    return known and recipe in section.of and recipe in field.of


@cache
def declared(path: str) -> tuple[About, About]:
    """Return what the lines of a field's section and of the field itself say."""
    return about(Config.model_fields[path.partition(".")[0]]), about(FIELDS[path])


def readable(written: GivenValues, evaluated: Collection[str]) -> dict[str, FieldValues]:
    """Section -> field -> value, without values that no algorithm of their recipe can read.

    Args:
        written: values by dotted path.
        evaluated: sections that may be set whatever the recipe is.
    """
    recipe = recipe_of(written.get("train.alg_name"))
    values: dict[str, FieldValues] = {section: {} for section in SECTIONS}
    for path, value in written.items():
        section, _, name = path.partition(".")
        if section in evaluated or can_read(recipe, path):
            values[section][name] = value
    return values


@cache
def numbers_of(recipe: str) -> frozenset[str]:
    """Fields of the numbers of the tables that a recipe can read."""
    read = {name for row in ROWS.of(recipe) for name in row.defaults}
    if recipe == "rl":
        parts = (*TABLE.values(), *FEATURES.values())
        read |= {number.key for part in parts for number in part.numbers}
    return frozenset(read)


def resume_rules() -> dict[str, str]:
    """Rules of what becomes of a run that is resumed with another value (see `Resume`): by dotted
    path, or by section where that is said of all of it; what is not there is fixed.
    """
    fields = Config.model_fields | FIELDS
    fields |= {f"{TEACHERS}.{name}": field for name, field in Teacher.model_fields.items()}
    rules = {path: about(field).resume for path, field in fields.items()}
    return {path: rule for path, rule in rules.items() if rule != "fixed"}


# Who samples what by which weights, where sampling goes on while a batch trains.
OF_SAMPLERS = ("name", "max_rows", "actors", "processes", "placement")


def resume_rules_of(cfg: Config) -> dict[str, str]:
    """The rules of a run: where samples may lag behind, other samplers make another run.

    Args:
        cfg: of the run.
    """
    rules = resume_rules()
    if cfg.rollout.max_staleness:
        rules |= {f"inference_engine.{name}": "fixed" for name in OF_SAMPLERS}
    return rules


def fields_read(cfg: Config) -> frozenset[str]:
    """Dotted paths that training with `cfg` reads."""
    found = verdicts(cfg)
    return frozenset(path for path in FIELDS if unmet(path, cfg, found) is None)


def verdicts(cfg: Config) -> Verdicts:
    """Ask every condition of a configuration, in their order."""
    return {condition: condition(cfg) for condition in SENTENCES}


def unmet(path: str, cfg: Config, found: Verdicts) -> Unmet | None:
    """The first thing that a field needs and a run has not; None where the field is read.

    Args:
        path: dotted, of the field.
        cfg: of the run.
        found: the verdicts on it.
    """
    section, field = declared(path)
    asked = (*section.when, *field.when)
    for condition, holds in found.items():
        if condition not in asked:
            continue
        if holds is None:
            holds = attrgetter(path)(cfg) != FIELDS[path].default
        if not holds:
            return condition
    for recipes in (section.of, field.of):
        if cfg.recipe not in recipes:
            return recipes
    number = field.number
    return None if number is None or number.key in cfg.train.row.defaults else number


def read_values(cfg: Config) -> FieldValues:
    """Dotted path -> value of every field that is read, in the order of the schema; unset cells are
    left out.
    """
    unset = {name for name in CELLS if getattr(cfg.train, name) is None}
    # A null that is written has samples of other weights or kernels uncorrected.
    unset -= cfg.train.model_fields_set & {"correction"}
    read = fields_read(cfg) - {f"train.{name}" for name in unset}
    return {path: _plain(attrgetter(path)(cfg)) for path in FIELDS if path in read}


def written_values(cfg: Config) -> FieldValues:
    """Dotted path -> value of every field that was set to another value than its default, whether
    it is read or not.
    """
    found: FieldValues = {}
    for path, field in FIELDS.items():
        section, _, name = path.partition(".")
        given = getattr(cfg, section)
        value = getattr(given, name)
        # That evaluation is switched off is written as data.eval: null, its default.
        if name in given.model_fields_set and (path == "data.eval" or value != field.default):
            found[path] = value
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
    return {
        name: part.model_dump(exclude_none=True) if isinstance(part, Section) else part
        for name, part in value.items()
    }


def dump_config(cfg: Config) -> str:
    """YAML text of the resolved configuration; loading it gives an equal object.

    Only what looks like a secret in a value becomes ***: the text is shown and kept.
    """
    lines: list[str] = []
    for section, fields in sections_of(read_values(cfg)).items():
        lines.append(f"{section}:\n")
        lines += [f"  {name}: {_scalar(value)}\n" for name, value in fields.items()]
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
