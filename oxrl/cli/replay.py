"""`oxrl replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.console import say
from oxrl.models.lazy_transformers import import_model_classes


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    step: Annotated[
        int,
        typer.Option(help="Optimizer step, as in metrics.jsonl and samples.jsonl."),
    ],
    sample: Annotated[
        int | None, typer.Option(help="Only this one of the step's samples, from 0.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Relative, of sums; default: 1e-5.")
    ] = None,
) -> None:
    """Make an update, or draw a sample, once more and compare it with the record.

    It begins at the nearest checkpoint before and writes nothing. Exit code 0: equal, 1: different.
    """
    import_model_classes()
    from oxrl.commands.replay import replay as go_through_again  # torch

    findings = go_through_again(run, step, sample, tolerance=tolerance)
    for finding in findings:
        say(str(finding))
    raise typer.Exit(0 if all(finding.equal for finding in findings) else 1)
