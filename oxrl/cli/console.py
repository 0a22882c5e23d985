"""The shared parts of commands: arguments, prints, and errors with exit codes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from oxrl.config import Config, load_config
from oxrl.errors import OxrlError, why_no_file
from oxrl.redact import shown
from oxrl.runs.os_errors import explained

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="section.field=value sets, ~section.field takes back."
    ),
]


def writable(out: Path | None) -> Path | None:
    """Refuse before the work is done what could not be written after it."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{out}: {why_no_file(out)}")
    return out


Out = Annotated[
    Path | None,
    typer.Option(
        "--out", callback=writable, help="Write every response there, one JSON object per line."
    ),
]


def load(path: Path, overrides: Sequence[str] | None) -> Config:
    """Load a config and print its warnings as lines of our own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cfg = load_config(path, overrides or [])
    for warning in caught:
        say(f"warning: {warning.message}", err=True)
    return cfg


def run_program(program: Callable[[], object]) -> None:
    """Turn our own errors into a message and an exit code; a bug keeps its traceback."""
    _open_streams()
    try:
        with explained():
            program()
    except OxrlError as error:
        say(f"error: {error}", err=True)
        _leave_refusing_output()
        sys.exit(error.exit_code)


def say(text: str, *, err: bool = False) -> None:
    """Print what may hold the words of others: no secret, and nothing that a terminal obeys."""
    typer.echo(shown(text), err=err)


def _open_streams() -> None:
    """Send a standard stream that was closed to nowhere: the next file would get its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")


def _leave_refusing_output() -> None:
    """Drop what standard output does not take, which would fail once more at the very end."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
