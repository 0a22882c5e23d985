"""`oxrl replay`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oxrl.cli.console import say
from oxrl.errors import required
from oxrl.models.lazy_transformers import import_model_classes

if TYPE_CHECKING:
    from oxrl.commands.replay import Mismatch
    from oxrl.rollouts.schedule import WrongLine


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    step: Annotated[
        int | None,
        typer.Option(help="Optimizer step, as in metrics.jsonl and samples.jsonl."),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="Only this one of the step's samples, from 0.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Relative, of sums; default: 1e-5.")
    ] = None,
    schedule: Annotated[
        bool,
        typer.Option(
            "--schedule",
            help="All of a run with rollout.schedule: free, without its clock; up to --step.",
        ),
    ] = False,
) -> None:
    """Make an update, or draw a sample, once more and compare it with the record.

    It begins at the nearest checkpoint before and writes nothing. Exit code 0: equal, 1: different.
    """
    if step is None and not schedule:
        raise typer.BadParameter("is missing: say which step", param_hint="--step")
    if schedule and sample is not None:
        raise typer.BadParameter("is of one step: leave out --schedule", param_hint="--sample")
    import_model_classes()
    from oxrl.commands import replay as steps  # torch
    from oxrl.commands import replay_schedule as schedules  # torch

    findings: Sequence[Mismatch | WrongLine]
    if schedule:
        findings = schedules.replay_schedule(run, step, tolerance=tolerance)
    else:
        findings = steps.replay(run, required(step, "--step"), sample, tolerance=tolerance)
    for finding in findings:
        say(str(finding))
    raise typer.Exit(0 if all(finding.equal for finding in findings) else 1)
