"""`oxrl config show`, `schema`, `diff` and `convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.console import ConfigFile, Overrides, load, say
from oxrl.config import config_diff, config_schema, dump_config
from oxrl.config.convert import converted


def config_show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration: every field that the run reads."""
    say(dump_config(load(config, overrides)).removesuffix("\n"))


def config_schema_command() -> None:
    """Print the JSON schema of the YAML file."""
    typer.echo(json.dumps(config_schema(), indent=2))


def config_diff_command(
    a: Annotated[Path, typer.Argument(help="YAML file.")],
    b: Annotated[Path, typer.Argument(help="YAML file.")],
) -> None:
    """Print the fields in which two configurations differ, defaults included."""
    for path, (left, right) in config_diff(load(a, None), load(b, None)).items():
        say(f"{path}: {json.dumps(left)} -> {json.dumps(right)}")


def config_convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML of verl, or of TRL's names.")],
) -> None:
    """Print a configuration of TRL or verl as ours; what has no counterpart as comments."""
    say(converted(file))
