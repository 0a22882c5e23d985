"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oxrl.errors import why_no_file

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
