"""`oxrl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from oxrl.cli.console import say


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL",
            help="Run (its newest checkpoint), checkpoint, or model by folder or name.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to write to: not there yet, or empty; outside of runs.")
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")
    ] = "float32",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export there, nothing else.")
    ] = False,
) -> None:
    """Write a whole model in Hugging Face format, adapters merged into its weights."""
    from oxrl.commands.export import run_export  # torch

    say(f"wrote {run_export(source, out, dtype=dtype, overwrite=overwrite)}")
