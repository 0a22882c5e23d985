"""`oxrl score`, `oxrl compare` and `oxrl contamination`, as the command line declares them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.console import say, writable
from oxrl.models.lazy_transformers import import_model_classes


def score(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory with samples.jsonl.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[reward.KEY=VALUE]...", help="Another reward, or other settings of the run's."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", callback=writable, help="Write both scores of every sample there, as JSONL."
        ),
    ] = None,
) -> None:
    """Score the samples of a run with another reward; say what would have changed."""
    import_model_classes()
    from oxrl_stats.score import report, run_score  # torch

    say(report(run_score(run, overrides or [], out)))
