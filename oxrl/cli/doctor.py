"""`oxrl doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oxrl.commands.doctor import examine


def doctor(
    runs: Annotated[Path, typer.Option(help="Where runs will be written.")] = Path("runs"),
) -> None:
    """Say what works on this machine, what does not and how to fix it."""
    findings = examine(runs)
    for title in ("needed by every run", "optional"):
        typer.echo(title)
        for state, subject, text, fix, optional in findings:
            if optional == (title == "optional"):
                before = "; " if optional else f"\n{'':<26}fix: "
                typer.echo(f"  {state:<8}{subject:<16}{text}{before + fix if fix else ''}")
    raise typer.Exit(1 if any(finding.state == "FAIL" for finding in findings) else 0)
