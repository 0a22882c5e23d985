"""The commands of `main_rl.py` and `main_sl.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from oxrl.cli.console import Overrides, load, run_program
from oxrl.cli.train import Accept, DryRun, Resume, train_or_rehearse
from oxrl.errors import ConfigError


def script(kind: Literal["rl", "sl"]) -> None:
    """Entry point of `main_rl.py` and `main_sl.py`: `--config FILE [key=value ...]`.

    Args:
        kind: of algorithm that the script takes; the other kind is refused.
    """
    kinds = {"rl": "reinforcement learning", "sl": "learning from given answers"}

    def train_kind(
        config: Annotated[Path, typer.Option(help="YAML file.")],
        overrides: Overrides = None,
        resume: Resume = False,
        accept: Accept = None,
        dry_run: DryRun = False,
    ) -> None:
        cfg = load(config, overrides)
        found = "rl" if cfg.recipe == "rl" else "sl"
        if found != kind:
            raise ConfigError(
                f"train.alg_name={cfg.train.alg_name} is {kinds[found]}; use: "
                f"python main_{found}.py --config {config}"
            )
        train_or_rehearse(cfg, resume=resume, accept=accept or [], dry_run=dry_run)

    program = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    program.command(help=f"Train by {kinds[kind]}; the same as `oxrl train CONFIG`.")(train_kind)
    run_program(program)
