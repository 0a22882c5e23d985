"""Everything wrong with a configuration, in words: what is right, and what may have been meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from oxrl.config.field import why_bounded
from oxrl.config.other_names import OTHER_NAMES, meaning, meant_by, translated
from oxrl.config.schema import FIELDS, SECTIONS
from oxrl.config.sections.reward import RewardPart
from oxrl.config.source import PARTS, UNSET, Problem, Source, Values
from oxrl.config.unknown_names import homes
from oxrl.errors import did_you_mean
from oxrl.redact import HIDDEN, SECRET_NAME


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
    if context.keys() & {"ge", "gt", "le", "lt"}:
        rule += why_bounded(field, below=bool(context.keys() & {"ge", "gt"}))
    return Problem(path, f"{rule} ({text})", value)


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
        for near in get_close_matches(name, [*elsewhere, *OTHER_NAMES], n=1):
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


def report(problems: list[Problem], source: Source) -> str:
    """Every problem with its place: those of the file in the order of its lines, then those of
    overrides.
    """
    blocks: list[tuple[float, str]] = []
    for problem in problems:
        place = problem.where or source.place(problem.path)
        line = place.rpartition(":")[2]
        secret = isinstance(problem.value, str) and SECRET_NAME.fullmatch(problem.path)
        value = HIDDEN if secret else _shorten(problem.value)
        shown = "" if problem.value is UNSET else f" = {value}"
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
