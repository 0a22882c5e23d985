"""Files of rows: they are there, and of a format that can be read."""

from __future__ import annotations

from pathlib import Path

from oxrl.config.checks.base import Problems
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.errors import DataError, UnreachableError, why_no_file
from oxrl.modelfiles.hub import SCHEME, SUFFIXES, locate


def check_training_files(cfg: Config) -> Problems:
    """Files of `data.train` exist and can be read."""
    several = not isinstance(cfg.data.train, str)
    for file in cfg.data.train_files:
        yield from _file_problems(cfg, f"data.train.{file}" if several else "data.train", file)


def check_evaluation_file(cfg: Config) -> Problems:
    """The file of `data.eval` exists and can be read."""
    if cfg.data.eval is not None:
        yield from _file_problems(cfg, "data.eval", cfg.data.eval)


def _file_problems(cfg: Config, path: str, file: str) -> Problems:
    """A data file exists, here or on the hub, and has a format that can be read."""
    if file.startswith(SCHEME):
        try:
            locate(file, fetch=False)
        except UnreachableError:
            pass  # it may be there for the run: `oxrl plan` says "unknown", the run fetches or ends
        except DataError as error:
            yield Problem(path, str(error), file)
    elif Path(file).suffix not in SUFFIXES:
        yield Problem(
            path, f"must end in {' or '.join(SUFFIXES)}; `oxrl prepare` writes such files", file
        )
    elif not Path(file).is_file():
        yield Problem(path, why_no_file(file), file)
    if cfg.data.stream and file.endswith(".parquet"):
        yield Problem(
            path, "must end in .jsonl for data.stream, which reads rows by their place", file
        )
