"""`load_config`: YAML and overrides in, one checked `Config` out, or one error that lists
everything wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from oxrl.config.checks import evaluation_problems, notices, training_problems
from oxrl.config.field import CELLS
from oxrl.config.reads import OF_EVALUATIONS, fields_read, sections_of, why_unread
from oxrl.config.schema import EVALUATED, FIELDS, Config, fields_of, recipe_of, root_class
from oxrl.config.source import Problem, Source, Values, read_source
from oxrl.errors import ConfigError, OxrlError
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
    return checked(read_with_overrides(path, overrides), training_problems, evaluates=False)


def read_with_overrides(path: Path | str, overrides: Sequence[str]) -> Source:
    """Read a YAML file, and enter overrides in order; what is wrong is kept with it.

    Raises:
        ConfigError: the file cannot be read, is empty or no YAML.
    """
    source = read_source(path)
    if overrides:
        from oxrl.config.overrides import apply_overrides  # a file may say everything

        apply_overrides(source, overrides)
    return source


def load_source(source: Source) -> Config:
    """As `load_config`, of what was read already.

    Raises:
        ConfigError: lists every problem with its field, value and rule.
    """
    return checked(source, training_problems, evaluates=False)


def load_evaluation_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, to evaluate with: reward and rollout are read even for `sft`.

    Rules about training data and training samples do not apply, so `rollout.top_p` and `top_k` may
    be set.
    """
    return checked(read_with_overrides(path, overrides), evaluation_problems, evaluates=True)


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
    from oxrl.config.overrides import apply_overrides  # a file may say everything

    source = Source(f"the evaluation of {model}", values)
    apply_overrides(source, overrides)
    data = source.values.setdefault("data", {})
    if "eval" in data:
        data.setdefault("train", data["eval"])
    return checked(source, evaluation_problems, evaluates=True)


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
        _refuse(problems, Source(file="the configuration"))


def _new(found: Iterable[Problem], known: Sequence[Problem]) -> list[Problem]:
    """Problems that do not only follow from those that are known."""
    problems = list(found)
    if not problems:
        return []
    from oxrl.config.mistakes import without_consequences  # most runs have none

    return without_consequences(problems, known)


def _refuse(problems: list[Problem], source: Source) -> NoReturn:
    from oxrl.config.mistakes import report  # most runs are not refused

    raise ConfigError(report(problems, source))


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


def checked(
    source: Source, check: Callable[[Config], Iterable[Problem]], *, evaluates: bool
) -> Config:
    """Check fields, across sections with `check`, and warn of what does less than it seems to.

    Raises:
        ConfigError: lists every problem with its place, field, value and rule.
    """
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
        _refuse(problems, source)
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
            place = source.place(f"train.{name}")
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
    problems = [*source.problems]
    if source.foreign:
        from oxrl.config.mistakes import read_misnamed  # most files have names of ours alone

        problems += _new(read_misnamed(source, written), source.problems)
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
    from oxrl.config.mistakes import field_problem  # most values are right

    wrong = [detail for detail in details if detail["type"] != "missing"]
    missing = [detail for detail in details if detail["type"] == "missing"]
    problems += [field_problem(detail) for detail in wrong]
    problems += _new((field_problem(detail) for detail in missing), problems)
    for detail in details:
        section, name = (str(part) for part in detail["loc"][:2])
        path = f"{section}.{name}"
        values[section].pop(name, None)
        if path in _PLACEHOLDERS:
            values[section][name] = _PLACEHOLDERS[path]
    return root.model_validate(values), problems


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
