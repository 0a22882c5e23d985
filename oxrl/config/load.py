"""`load_config`: YAML and overrides in, one checked `Config` out, or one error that lists
everything wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from oxrl.config.checks import evaluation_problems, notices, training_problems
from oxrl.config.checks.reward import check_reward
from oxrl.config.field import CELLS, why_bounded
from oxrl.config.other_names import OTHER_NAMES, meaning, meant_by, translated
from oxrl.config.reads import OF_EVALUATIONS, fields_read, sections_of, why_unread
from oxrl.config.schema import EVALUATED, FIELDS, SECTIONS, Config, fields_of, recipe_of, root_class
from oxrl.config.sections.reward import RewardPart
from oxrl.config.source import (
    PARTS,
    UNSET,
    Problem,
    Source,
    Values,
    apply_overrides,
    given_source,
    homes,
    read_source,
)
from oxrl.errors import ConfigError, OxrlError, did_you_mean
from oxrl.redact import HIDDEN, SECRET_NAME
from oxrl.runs.directory import is_run, recorded_config
from oxrl.runs.targets import named_run

# Stand in for required fields that are missing or wrong, so that the other checks can still run.
_PLACEHOLDERS: dict[str, str | int] = {
    "run.name": "unnamed",
    "run.steps": 1,
    "model.name": "unnamed",
    "data.train": "unnamed.jsonl",
    "train.alg_name": "sgrpo",
}


# What an override begins with that says what scores.
REWARDED = ("reward.name=", "reward.parts=", "reward.parts.")


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read, check and freeze the configuration of a training run.

    Args:
        path: YAML file with the sections run, model, data, train and, where read, reward, rollout,
            inference_engine.
        overrides: `section.field=value` sets a field, `~section.field` takes back one that the file
            sets; in order.

    Raises:
        ConfigError: lists every problem with its place, field, value and rule.
    """
    return _load(read_source(path, overrides), training_problems, evaluates=False)


def load_source(source: Source) -> Config:
    """As `load_config`, of what was read already.

    Raises:
        ConfigError: lists every problem with its field, value and rule.
    """
    return _load(source, training_problems, evaluates=False)


def load_evaluation_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, to evaluate with: reward and rollout are read even for `sft`.

    Rules about training data and training samples do not apply, so `rollout.top_p` and `top_k` may
    be set.
    """
    return _load(read_source(path, overrides), evaluation_problems, evaluates=True)


def load_reward_config(path: Path | str, overrides: Sequence[str]) -> Config:
    """The configuration of a run with another reward, to score what was sampled.

    Args:
        path: of the run.
        overrides: of `reward`; a name or parts take the place of the run's own, with its options.

    Raises:
        ConfigError: lists every problem with its place, field, value and rule.
    """
    source = read_source(path, ())
    if any(override.startswith(("reward.name=", "reward.parts=")) for override in overrides):
        for name in ("name", "parts", "options"):
            source.values.get("reward", {}).pop(name, None)
    for override in overrides:
        if not override.removeprefix("~").startswith("reward."):
            rule = "is not what scores: only reward.FIELD=VALUE can be given here"
            source.wrong(override.partition("=")[0], rule, f"override '{override}'")
    apply_overrides(source, overrides)
    return _load(source, _reward_problems, evaluates=True)


def _reward_problems(cfg: Config) -> Iterator[Problem]:
    if not cfg.reward.exists:
        rule = "is required: the run has no reward of its own; write reward.name=NAME"
        yield Problem("reward.name", rule)
    yield from check_reward(cfg)


def model_evaluation_config(model: str, overrides: Sequence[str]) -> Config:
    """What evaluates a model that belongs to no run: everything else is said by overrides.

    With a reward or an environment its responses to prompts are scored; without one it is judged by
    the likelihood of the answers in data.eval.
    """
    scoring = (*REWARDED, "environment.name=")
    rewarded = any(override.startswith(scoring) for override in overrides)
    values: Values = {
        "run": {"name": "evaluation", "steps": 1},
        "model": {"name": model},
        "train": {"alg_name": "sgrpo" if rewarded else "sft"},
    }
    source = given_source(f"the evaluation of {model}", values, overrides)
    data = source.values.setdefault("data", {})
    if "eval" in data:
        data.setdefault("train", data["eval"])
    return _load(source, evaluation_problems, evaluates=True)


def check_config(cfg: Config) -> None:
    """Every check across sections, on a configuration however it was made.

    `load_config` has made them, with the places of the file; a run makes them of whatever it is
    given, so that a configuration from Python is held to the same.

    Args:
        cfg: of a training run.

    Raises:
        ConfigError: lists every problem with its field, value and rule.
    """
    problems = _new(_unread(cfg, _source_of(cfg)), [])
    problems += _new(training_problems(cfg), problems)
    if problems:
        raise ConfigError(_report(problems, Source(file="the configuration")))


def _source_of(cfg: Config) -> Source:
    """What a configuration made in Python says: the fields that differ from their defaults."""
    source = Source(file="the configuration")
    for section in type(cfg).model_fields:
        given = getattr(cfg, section)
        fields = type(given).model_fields
        for name in given.model_fields_set.intersection(fields):
            value = getattr(given, name)
            off = (section, name, value) == ("data", "eval", None)
            if off or value != fields[name].default:
                source.values.setdefault(section, {})[name] = value
    return source


def _load(
    source: Source, check: Callable[[Config], Iterable[Problem]], *, evaluates: bool
) -> Config:
    """Check fields, across sections with `check`, and warn of what does less than it seems to."""
    with suppress(OSError, OxrlError):  # told by the checks, or where the run is opened
        if not evaluates and is_run(source.directory):
            _keep_what_was_taken(source.values, sections_of(recorded_config(source.directory)))
    cfg, problems = _validate(source, evaluates=evaluates)
    unread = _unread(cfg, source)
    if evaluates:
        unread = (problem for problem in unread if problem.path.split(".")[0] not in EVALUATED)
    problems += _new(unread, problems)
    problems += _new(check(cfg), problems)
    if problems:
        raise ConfigError(_report(problems, source))
    # What an evaluation does less than it seems to was told when it trained.
    told = () if evaluates else (*_dropped_signs(cfg, source), *notices(cfg))
    for notice in told:
        warnings.warn(notice, UserWarning, stacklevel=3)
    return cfg


def _keep_what_was_taken(given: object, began: object) -> None:
    """A run that is there already keeps the checkpoints that it began with.

    Args:
        given: what is written now, at any depth: names of runs in it are replaced.
        began: what the run recorded there.
    """
    if not (isinstance(given, dict) and isinstance(began, dict)):
        return
    for name in given.keys() & began.keys():
        written = given[name]
        then = began[name]
        if name == "name" and isinstance(written, str) and isinstance(then, str):
            if named_run(written) in Path(then).parents:
                given[name] = then
        _keep_what_was_taken(written, then)


def _dropped_signs(cfg: Config, source: Source) -> list[str]:
    """One warning for all clip bounds that were written with a sign."""
    signs: list[str] = []
    for name, value in source.values.get("train", {}).items():
        if name in ("clip_low", "clip_high") and float(str(value)) < 0:
            stored = getattr(cfg.train, name)
            place = _place(f"train.{name}", source)
            signs.append(f"train.{name} = {value} is stored as {stored} ({place})")
    if not signs:
        return []
    return ["clip bounds are magnitudes, the sign is dropped: " + "; ".join(signs)]


def _validate(source: Source, *, evaluates: bool) -> tuple[Config, list[Problem]]:
    """Check every field on its own.

    Returns:
        The configuration, without fields that its recipe cannot read and with defaults in place of
        wrong ones; and what is wrong.
    """
    written = {section: dict(fields) for section, fields in source.values.items()}
    misnamed = _read_misnamed(source, written)
    problems = [*source.problems, *_new(misnamed, source.problems)]
    recipe = recipe_of(written)
    root = root_class(recipe, evaluates=evaluates)
    known = fields_of(recipe, evaluates=evaluates)
    values: Values = {section: {} for section in root.model_fields}
    for section, fields in written.items():
        for name, value in fields.items():
            if f"{section}.{name}" in known:
                values[section][name] = value
    try:
        return root.model_validate(values), problems
    except ValidationError as error:
        details = error.errors(include_url=False)
    wrong = [detail for detail in details if detail["type"] != "missing"]
    missing = [detail for detail in details if detail["type"] == "missing"]
    problems += [_field_problem(detail) for detail in wrong]
    problems += _new((_field_problem(detail) for detail in missing), problems)
    for detail in details:
        section, name = (str(part) for part in detail["loc"][:2])
        path = f"{section}.{name}"
        values[section].pop(name, None)
        if path in _PLACEHOLDERS:
            values[section][name] = _PLACEHOLDERS[path]
    return root.model_validate(values), problems


def _read_misnamed(source: Source, written: Values) -> list[Problem]:
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
                source.where[field] = _place(path, source)
    return problems


def _field_problem(detail: ErrorDetails) -> Problem:
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


def _unread(cfg: Config, source: Source) -> Iterator[Problem]:
    """Fields that are written down and that this run does not read."""
    read = fields_read(cfg)
    if source.switched_off("data.eval"):
        # Whoever switches evaluation off need not touch what says how it is done.
        read |= {*OF_EVALUATIONS}
    cells = ("train.alg_name", *(f"train.{name}" for name in CELLS))
    for path in FIELDS:
        if source.written(path) and path not in read:
            section, _, name = path.partition(".")
            yield Problem(path, why_unread(path, cfg), source.values[section][name], also=cells)


def _new(found: Iterable[Problem], known: Sequence[Problem]) -> list[Problem]:
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


def _report(problems: list[Problem], source: Source) -> str:
    """Every problem with its place: those of the file in the order of its lines, then those of
    overrides.
    """
    blocks: list[tuple[float, str]] = []
    for problem in problems:
        place = problem.where or _place(problem.path, source)
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


def _place(path: str, source: Source) -> str:
    """Where a field was written, or else what it would stand in."""
    while path and path not in source.where:
        path = path.rpartition(".")[0]
    return source.where.get(path, source.file)


def _shorten(value: object) -> str:
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    )
    return text if len(text) <= 80 else f"{text[:77]}..."
