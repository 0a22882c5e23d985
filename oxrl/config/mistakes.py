"""Everything wrong with a configuration, in words: what is right, and what may have been meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from operator import attrgetter

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from oxrl.config.field import about
from oxrl.config.names import homes, meaning, meant_by, other_names, translated
from oxrl.config.schema import FIELDS, SECTIONS, Config
from oxrl.config.sections.reward import RewardPart
from oxrl.config.source import AS_IT_IS, UNSET, Problem, Source, Values
from oxrl.errors import did_you_mean
from oxrl.flat_config import PARTS
from oxrl.redact import HIDDEN, SECRET_NAME

# Stand in for required fields that are missing or wrong, so that the other checks can still run.
PLACEHOLDERS: dict[str, str | int] = {
    "run.name": "unnamed",
    "run.steps": 1,
    "model.name": "unnamed",
    "data.train": "unnamed.jsonl",
    "train.alg_name": "sgrpo",
}


def read_misnamed(source: Source, written: Values) -> list[Problem]:
    """Read values under names that are none of ours as what was meant, where nothing else is
    written there: what is wrong with them is told at once.

    Args:
        written: section -> field -> value, of the names that are ours; added to.

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
            section, _, name = field.partition(".")
            if field in FIELDS and name not in written.setdefault(section, {}):
                written[section][name] = found
                source.where[field] = source.place(path)
    return problems


def without_wrong_fields(
    values: Values, error: ValidationError, known: Sequence[Problem]
) -> list[Problem]:
    """Take wrong fields out of a configuration, so that what else is wrong can be found.

    Args:
        values: section -> field -> value, in which defaults and placeholders take their places.
        error: says which are wrong.
        known: problems that were found before.

    Returns:
        What is wrong with them.
    """
    details = error.errors(include_url=False)
    problems = [field_problem(detail) for detail in details if detail["type"] != "missing"]
    missing = [field_problem(detail) for detail in details if detail["type"] == "missing"]
    problems += without_consequences(missing, [*known, *problems])
    for detail in details:
        section, name = (str(part) for part in detail["loc"][:2])
        path = f"{section}.{name}"
        values[section].pop(name, None)
        if path in PLACEHOLDERS:
            values[section][name] = PLACEHOLDERS[path]
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
    """Why the bound that was crossed is there, as the end of a sentence; empty where plain."""
    why = ""
    if not {"ge", "gt"}.isdisjoint(crossed):
        why = about(field).too_low
    elif not {"le", "lt"}.isdisjoint(crossed):
        why = about(field).why
    return f", because {why}" if why else ""


def _field_at(place: tuple[int | str, ...]) -> FieldInfo:
    """The field at a place, of a section or of a part of a reward."""
    section, name, *inside = map(str, place)
    if f"{section}.{name}" == PARTS and len(inside) > 1:
        return RewardPart.model_fields[inside[1]]
    return SECTIONS[section].model_fields[name]


def _unknown_field(path: str, value: object) -> Problem:
    """A field that no recipe has, or no part of a reward, with what may have been meant."""
    section, _, name = path.rpartition(".")
    if path.startswith(f"{PARTS}."):
        of_part = RewardPart.model_fields
        hint = f"{did_you_mean(name, of_part)} (of a part: {', '.join(of_part)})"
        return Problem(path, f"unknown field{hint}", value)
    hint = meant_by(path) or homes(name)
    if not hint and section in SECTIONS:
        hint = did_you_mean(name, SECTIONS[section].model_fields)
        elsewhere = [field.partition(".")[2] for field in FIELDS]
        for near in get_close_matches(name, [*elsewhere, *other_names()], n=1):
            hint = hint or homes(near) or meant_by(near)
    return Problem(path, f"unknown field{hint}", value)


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
    if any(path.startswith(f"{PARTS}.") for path in wrong):
        wrong.add(PARTS)
    kept: list[Problem] = []
    for problem in found:
        if wrong.isdisjoint((problem.path, *problem.also)):
            kept.append(problem)
            wrong.add(problem.path)
    return kept


def report(problems: list[Problem], source: Source, cfg: Config) -> str:
    """Every problem with its place: those of the file in the order of its lines, then those of
    overrides.
    """
    blocks: list[tuple[float, str]] = []
    for problem in problems:
        place = problem.where or source.place(problem.path)
        line = place.rpartition(":")[2]
        value = problem.value
        if value is AS_IT_IS:
            value = attrgetter(problem.path)(cfg)
        secret = isinstance(value, str) and SECRET_NAME.fullmatch(problem.path)
        told = HIDDEN if secret else _shorten(value)
        shown = "" if value is UNSET else f" = {told}"
        block = f"{place}: {problem.path}{shown}\n    {problem.rule}"
        blocks.append((int(line) if line.isdigit() else float("inf"), block))
    count = "1 problem" if len(blocks) == 1 else f"{len(blocks)} problems"
    return f"{count} in {source.file}\n\n" + "\n".join(
        block for _, block in sorted(blocks, key=lambda pair: pair[0])
    )


def _shorten(value: object) -> str:
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    )
    return text if len(text) <= 80 else f"{text[:77]}..."
