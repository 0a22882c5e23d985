"""`oxrl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.console import say, writable


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    out: Annotated[
        Path | None,
        typer.Option(callback=writable, help="The file; default: report.html in the first run."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page to this machine while runs go on.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of --live; 0: any.")] = 0,
) -> None:
    """Write runs as one HTML page that opens offline: curves, health, samples, configuration."""
    if live:
        from oxrl.report.live import serve  # a server, which a file does without

        serve(runs, port, lambda url: say(f"serving {url} until Ctrl-C"))
        return
    from oxrl.report.page import write_report  # the page

    say(f"wrote {write_report(runs, out)}")
