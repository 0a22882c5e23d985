"""`load_config`: YAML and overrides in, one checked `Config` out, or one error that lists
everything wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from oxrl.config import conditions
from oxrl.config.checks import training_problems
from oxrl.config.checks.notices import notices
from oxrl.config.field import about
from oxrl.config.reads import can_read, fields_read, sections_of
from oxrl.config.schema import FIELDS, SECTIONS, Config, recipe_of
from oxrl.config.sections.train import CELLS
from oxrl.config.source import Problem, Source, Values, read_source
from oxrl.errors import ConfigError, OxrlError
from oxrl.flat_config import recorded_config
from oxrl.runs.checkpoints import is_run, named_run
from oxrl.tables.numbers import NUMBERS


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
    return checked(read_with_overrides(path, overrides), training_problems)


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
    return checked(source, training_problems)


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
        _refuse(problems, Source(file="the configuration"), cfg)


def _new(found: Iterable[Problem], known: Sequence[Problem]) -> list[Problem]:
    """Problems that do not only follow from those that are known."""
    problems = list(found)
    if not problems:
        return []
    from oxrl.config.mistakes import without_consequences  # most runs have none

    return without_consequences(problems, known)


def _refuse(problems: list[Problem], source: Source, cfg: Config) -> NoReturn:
    from oxrl.config.mistakes import report  # most runs are not refused

    raise ConfigError(report(problems, source, cfg))


def _source_of(cfg: Config) -> Source:
    """Make a source of a configuration made in Python: its fields that are not at their default."""
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
    source: Source, check: Callable[[Config], Iterable[Problem]], evaluated: Collection[str] = ()
) -> Config:
    """Check fields, across sections with `check`, and warn of what does less than it seems to.

    Args:
        source: what was written.
        check: finds what is wrong across sections.
        evaluated: sections that may be set whatever the training algorithm reads; empty: it trains.

    Raises:
        ConfigError: lists every problem with its place, field, value and rule.
    """
    with suppress(OSError, OxrlError):  # told by the checks, or where the run is opened
        if not evaluated and is_run(source.directory):
            _keep_what_was_taken(source.values, sections_of(recorded_config(source.directory)))
    cfg, problems = _validate(source, evaluated)
    unread = _unread(cfg, source)
    found = (problem for problem in unread if problem.path.split(".")[0] not in evaluated)
    problems += _new(found, problems)
    problems += _new(check(cfg), problems)
    if problems:
        _refuse(problems, source, cfg)
    if not evaluated:  # what an evaluation does less than it seems to was told when it trained
        for notice in (*_about_numbers(cfg, source), *notices(cfg)):
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


def _about_numbers(cfg: Config, source: Source) -> Iterator[str]:
    """What is to be said of numbers of the algorithm that were chosen by hand."""
    if NUMBERS.keys() & source.values.get("train", {}):
        from oxrl.config.checks.numbers import number_notices

        yield from number_notices(cfg, source)


def _validate(source: Source, evaluated: Collection[str]) -> tuple[Config, list[Problem]]:
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
    values: Values = {section: {} for section in SECTIONS}
    for section, fields in written.items():
        for name, value in fields.items():
            path = f"{section}.{name}"
            if path in FIELDS and (section in evaluated or can_read(recipe, path)):
                values[section][name] = value
    try:
        return Config.model_validate(values), problems
    except ValidationError as error:
        from oxrl.config.mistakes import without_wrong_fields  # most values are right

        problems += without_wrong_fields(values, error, problems)
    return Config.model_validate(values), problems


def _unread(cfg: Config, source: Source) -> Iterator[Problem]:
    """Fields that are written down and that this run does not read."""
    read = fields_read(cfg)
    cells = ("train.alg_name", *(f"train.{name}" for name in CELLS))
    for path, field in FIELDS.items():
        if path in read or not source.written(path):
            continue
        # Whoever switches evaluation off need not touch what says how it is done.
        if source.switched_off("data.eval") and conditions.evaluates in about(field).when:
            continue
        from oxrl.config.unread import why_unread  # most of what is written is read

        section, _, name = path.partition(".")
        yield Problem(path, why_unread(path, cfg), source.values[section][name], also=cells)
