"""`load_config`: YAML and overrides in, one checked `Config` out, or one error that lists
everything wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from oxrl.config.checks import training_problems
from oxrl.config.checks.usual import notices
from oxrl.config.conditions import evaluates
from oxrl.config.field import about
from oxrl.config.reads import fields_read, readable, written_values
from oxrl.config.schema import FIELDS, Config
from oxrl.config.source import Check, Problem, Source, read_source
from oxrl.errors import ConfigError, OxrlError
from oxrl.flat_config import recorded_config
from oxrl.runs.checkpoints import is_run, named_run


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
    folder = Path(path).absolute().parent
    # The configuration of a run that was moved goes with it.
    if Path(path).name == "config.yaml" and is_run(folder):
        if source.directory.absolute() != folder:
            source.values["run.dir"] = str(folder)
    if overrides:
        from oxrl.config.given import apply_overrides  # a file may say everything

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
    accepted(cfg, Source("the configuration", written_values(cfg)), training_problems)


def checked(source: Source, check: Check, evaluated: Collection[str] = ()) -> Config:
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
            _keep_what_was_taken(source.values, recorded_config(source.directory))
    cfg = None
    if not source.foreign:
        with suppress(ValidationError):
            cfg = Config.model_validate(readable(source.values, evaluated))
    cfg = accepted(cfg, source, check, evaluated)
    if not evaluated:  # what an evaluation does less than it seems to was told when it trained
        for notice in notices(cfg, source):
            warnings.warn(notice, UserWarning, stacklevel=3)
    return cfg


def accepted(
    cfg: Config | None, source: Source, check: Check, evaluated: Collection[str] = ()
) -> Config:
    """Return a configuration in which nothing is wrong, or written and not read.

    Args:
        cfg: None where not even single fields can be read.
        source: what was written, with the problems of single fields.
        check, evaluated: as of `checked`.

    Raises:
        ConfigError: lists every problem.
    """
    unread: list[str] = []
    across: list[Problem] = []
    if cfg is not None:
        unread = list(_unread_fields(cfg, source, evaluated))
        across = list(check(cfg))
        if not (source.problems or unread or across):
            return cfg
    from oxrl.config.mistakes import read_what_is_right, report  # most runs are not refused

    if cfg is None:
        cfg = read_what_is_right(source, evaluated)
        unread = list(_unread_fields(cfg, source, evaluated))
        across = list(check(cfg))
    raise ConfigError(report(cfg, source, unread, across))


def _unread_fields(cfg: Config, source: Source, evaluated: Collection[str]) -> Iterator[str]:
    """Yield fields that are written down and that this run does not read."""
    read = fields_read(cfg)
    no_evaluation = source.values.get("data.eval", "") is None
    for path, field in FIELDS.items():
        if path in read or path not in source.values or path.partition(".")[0] in evaluated:
            continue
        # Whoever switches evaluation off need not touch what says how it is done.
        if not (no_evaluation and evaluates in about(field).when):
            yield path


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
        if name.rpartition(".")[2] == "name" and isinstance(written, str) and isinstance(then, str):
            if named_run(written) in Path(then).parents:
                given[name] = then
        _keep_what_was_taken(written, then)
