"""Everything wrong with a configuration, in words: what is right, and what may have been meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache
from operator import attrgetter, itemgetter

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from oxrl.config.conditions import SENTENCES
from oxrl.config.field import (
    ANSWERING,
    COMPARING,
    EVALUATING,
    OFFLINE,
    PREFERENCE,
    RL,
    SAMPLING,
    SUPERVISED,
    Section,
    about,
)
from oxrl.config.names import homes, meaning, meant_by, other_names, translated
from oxrl.config.reads import readable, unmet, verdicts
from oxrl.config.schema import FIELDS, SECTIONS, Config, FieldValues
from oxrl.config.sections.model import Teacher
from oxrl.config.sections.reward import RewardPart
from oxrl.config.sections.train import CELLS
from oxrl.config.source import AS_IT_IS, UNSET, Problem, Source
from oxrl.errors import counted, did_you_mean, shortened
from oxrl.flat_config import NAMED, PARTS, TEACHERS, named_in
from oxrl.redact import HIDDEN, SECRET_NAME
from oxrl.tables.cells import CELLS as TABLE
from oxrl.tables.numbers import Number
from oxrl.tables.policy import ROWS

# Field of mappings -> what one of them holds.
NAMED_SECTIONS: dict[str, type[Section]] = {PARTS: RewardPart, TEACHERS: Teacher}
# Stand in for required fields that are missing or wrong, so that the other checks can still run.
PLACEHOLDERS: dict[str, str | int] = {
    "run.name": "unnamed",
    "run.steps": 1,
    "model.name": "unnamed",
    "data.train": "unnamed.jsonl",
    "train.alg_name": "sgrpo",
}
# Recipes that read a field -> why a run of another recipe does not, {} its algorithm.
OF_RECIPES = {
    RL: "is read by reinforcement learning; {} is not: remove it",
    SAMPLING: "is read by reinforcement learning; {} is not: remove it",
    ANSWERING: (
        "is read by reinforcement learning and supervised fine-tuning; {} is neither: remove it"
    ),
    EVALUATING: (
        "is read by reinforcement learning and evaluations of supervised fine-tuning; {} is "
        "neither: remove it"
    ),
    OFFLINE: (
        "is read by supervised and preference algorithms; {} is reinforcement learning: remove it"
    ),
    PREFERENCE: "is read by preference methods; {} is none: remove it",
    COMPARING: (
        "is read by reinforcement learning and preference methods; {} is neither: remove it"
    ),
    SUPERVISED: "is read by supervised fine-tuning; {} is not: remove it",
}


def read_what_is_right(source: Source, evaluated: Collection[str]) -> Config:
    """Read a configuration of which something is wrong: misnamed values as what was meant, and
    defaults and placeholders in place of wrong values.

    Args:
        source: what was written; what is wrong with single fields is added to its problems.
        evaluated: as of `load.checked`.
    """
    problems = source.problems
    written = dict(source.values)
    problems += without_consequences(_read_misnamed(source, written), problems)
    values = readable(written, evaluated)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
    missing = [field_problem(detail) for detail in details if detail["type"] == "missing"]
    problems += [field_problem(detail) for detail in details if detail["type"] != "missing"]
    problems += without_consequences(missing, problems)
    for detail in details:
        section, name = (str(part) for part in detail["loc"][:2])
        path = f"{section}.{name}"
        values[section].pop(name, None)
        if path in PLACEHOLDERS:
            values[section][name] = PLACEHOLDERS[path]
    return Config.model_validate(values)


def _read_misnamed(source: Source, written: FieldValues) -> list[Problem]:
    """Read values under names that are none of ours as what was meant, where nothing else is
    written there: what is wrong with them is told at once.

    Args:
        written: values by the names that are ours; added to.

    Returns:
        One problem for each such name, but for those in sections that are none of ours and that
        no library is known to have: the section has its own.
    """
    problems: list[Problem] = []
    for path, value in source.foreign.items():
        section, dot, _ = path.partition(".")
        if section in SECTIONS or meaning(path) or not dot:
            problems.append(_unknown_field(path, value))
        meant, found = translated(path, value)
        for field in meant or [_meant(path)]:
            if field in FIELDS and field not in written:
                written[field] = found
                source.where[field] = source.place(path)
    return problems


def field_problem(detail: ErrorDetails) -> Problem:
    path = ".".join(str(part) for part in detail["loc"])
    value = detail["input"]
    context = detail.get("ctx", {})
    section = path.partition(".")[0]
    if detail["type"] == "extra_forbidden":
        return _unknown_field(path, value)
    if detail["type"] == "value_error":
        return Problem(path, str(context["error"]), value)
    field = _field_at(detail["loc"])
    text = field.description or ""
    if detail["type"] == "missing":
        return Problem(path, f"is required: {text[0].lower()}{text[1:]}", also=(section,))
    if value is None:
        return Problem(path, "is empty; write a value or remove the line", value)
    rule = detail["msg"].replace("Input should be", "must be").replace("String should", "must")
    if detail["type"] == "literal_error":
        rule += did_you_mean(
            str(value), context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        )
    if detail["type"] == "string_type" and isinstance(value, int | float):
        rule += f"; quote it if it is meant as text: '{value}'"
    return Problem(path, f"{rule}{_why_bounded(field, context.keys())} ({text})", value)


def _why_bounded(field: FieldInfo, crossed: Collection[str]) -> str:
    """Tell why the bound that was crossed is there, as the end of a sentence; empty where plain."""
    why = ""
    if not {"ge", "gt"}.isdisjoint(crossed):
        why = about(field).too_low
    elif not {"le", "lt"}.isdisjoint(crossed):
        why = about(field).why
    return f", because {why}" if why else ""


def _field_at(place: tuple[int | str, ...]) -> FieldInfo:
    """The field at a place, of a section or of a part of a reward."""
    section, name, *inside = map(str, place)
    inner = NAMED_SECTIONS.get(f"{section}.{name}")
    if inner is not None and len(inside) > 1:
        return inner.model_fields[inside[1]]
    return SECTIONS[section].model_fields[name]


def _unknown_field(path: str, value: object) -> Problem:
    """A field that no recipe has, or no part of a reward, with what may have been meant."""
    section, _, name = path.rpartition(".")
    inside = named_in(path)
    if inside:
        fields = NAMED_SECTIONS[inside].model_fields
        kind = "part" if inside == PARTS else "teacher"
        hint = f"{did_you_mean(name, fields)} (of a {kind}: {', '.join(fields)})"
        return Problem(path, f"unknown field{hint}", value)
    hint = meant_by(path) or homes(name)
    if not hint and section in SECTIONS:
        hint = did_you_mean(name, SECTIONS[section].model_fields)
        elsewhere = [field.partition(".")[2] for field in FIELDS]
        for near in get_close_matches(name, [*elsewhere, *other_names()], n=1):
            hint = hint or homes(near) or meant_by(near)
    return Problem(path, f"unknown field{hint}", value)


@lru_cache
def _meant(path: str) -> str:
    """Known section or field closest to `path`; `path` itself when it is known or nothing is
    close.
    """
    section, dot, name = path.partition(".")
    section = next(iter(get_close_matches(section, SECTIONS, n=1)), section)
    if not dot or section not in SECTIONS:
        return section + dot + name
    close = get_close_matches(name, SECTIONS[section].model_fields, n=1)
    return f"{section}.{close[0]}" if close else path


def without_consequences(found: Iterable[Problem], known: Sequence[Problem]) -> list[Problem]:
    """Drop problems that only follow from fields which already have one, under their own name or
    misspelt.
    """
    wrong = {path for problem in known for path in (problem.path, _meant(problem.path))}
    wrong |= {named_in(path) for path in wrong} & set(NAMED)
    kept: list[Problem] = []
    for problem in found:
        if wrong.isdisjoint((problem.path, *problem.also)):
            kept.append(problem)
            wrong.add(problem.path)
    return kept


def report(
    cfg: Config,
    source: Source,
    unread: Sequence[str],
    across: Iterable[Problem],
) -> str:
    """Every problem with its place: those of the file in the order of its lines, then those of
    overrides.

    Args:
        source: what was written, with the problems of single fields.
        unread: fields that are written and not read; across: problems of several fields. What only
            follows from one before it is left out.
    """
    problems = source.problems
    cells = ("train.alg_name", *(f"train.{name}" for name in CELLS))
    not_read = [
        Problem(path, why_unread(path, cfg), source.values[path], also=cells) for path in unread
    ]
    problems += without_consequences(not_read, problems)
    problems += without_consequences(across, problems)
    blocks: list[tuple[float, str]] = []
    for problem in problems:
        place = problem.where or source.place(problem.path)
        line = place.rpartition(":")[2]
        block = f"{place}: {problem.path}{_shown_value(problem, cfg)}\n    {problem.rule}"
        blocks.append((int(line) if line.isdigit() else float("inf"), block))
    blocks.sort(key=itemgetter(0))
    told = "\n".join(block for _, block in blocks)
    return f"{counted(len(blocks), 'problem')} in {source.file}\n\n{told}"


def _shown_value(problem: Problem, cfg: Config) -> str:
    """The value of a problem's field, behind an equals sign; empty where none is told."""
    value = problem.value
    if value is UNSET:
        return ""
    if value is AS_IT_IS:
        value = attrgetter(problem.path)(cfg)
    text = repr(value)
    if isinstance(value, str) and SECRET_NAME.fullmatch(problem.path):
        text = HIDDEN
    elif value is None:
        text = "null"
    elif isinstance(value, bool):
        text = text.lower()
    return f" = {shortened(text)}"


def why_unread(path: str, cfg: Config) -> str:
    """Say what reads `path`, and so why this run does not.

    Args:
        path: dotted, of a field that this run does not read.
        cfg: of the run.
    """
    lacking = unmet(path, cfg, verdicts(cfg))
    if isinstance(lacking, tuple):
        return OF_RECIPES[lacking].format(cfg.train.alg_name)
    if isinstance(lacking, Number):
        return _why_no_number(lacking.key, cfg)
    return "" if lacking is None else SENTENCES[lacking].format(cfg=cfg)


def _why_no_number(name: str, cfg: Config) -> str:
    """Name the algorithms and cells that read a number which this run does not."""
    algorithms = [row.name for row in ROWS.values() if name in row.defaults]
    fields = {kind: field for field, kind in CELLS.items() if kind != "ratio"}
    choices: list[str] = []
    for (kind, cell), found in TABLE.items():
        if kind in fields and name in [number.key for number in found.numbers]:
            choices.append(f"train.{fields[kind]}: {cell}")
    known = [f"algorithms: {', '.join(algorithms)}"] if algorithms else []
    if choices:
        known.append(", ".join(choices))
    hint = ""
    if name == "beta" and cfg.recipe == "rl":
        hint = "; the weight of a KL term is train.kl_coeff here"
    return (
        f"is not read by {cfg.train.alg_name} as configured (read by {'; '.join(known)}); "
        f"remove it, or choose one of those{hint}"
    )
