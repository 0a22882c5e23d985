"""`oxrl plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.console import ConfigFile, Overrides, load, say
from oxrl.errors import ConfigError, counted
from oxrl.plan.plan import plan_text
from oxrl.plan.planners import planned_lines
from oxrl.plan.preflight_process import examine_apart


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="A run: with its lengths and seconds, who waits for whom."
        ),
    ] = None,
) -> None:
    """Check a config and what it names; print its batch equation, memory and disk; run nothing."""
    cfg = load(config, overrides)
    further = [*planned_lines(cfg, like)]
    say("\n".join((plan_text(cfg), *further)))
    wrong: dict[str, str] = {}
    for subject, state, text in examine_apart(cfg):
        if state == "wrong":  # what a later check finds under the same name follows from the first
            wrong.setdefault(text.partition(":")[0], text)
        else:
            say(f"{state:<12}{subject}: {text}")
    if wrong:
        count = counted(len(wrong), "problem")
        raise ConfigError("\n\n".join((f"{count} in what {config} names", *wrong.values())))
