"""`oxrl completion`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Your shell.")],
) -> None:
    """Print what completes commands in a shell; --install-completion puts it in place."""
    from typer.completion import get_completion_script

    script = get_completion_script(prog_name="oxrl", complete_var="_OXRL_COMPLETE", shell=shell)
    typer.echo(script)
