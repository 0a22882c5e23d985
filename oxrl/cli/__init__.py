"""The `oxrl` command.

Every command imports what it runs when it runs: help and config errors need no torch. A file of
this folder is a command; `train` is read at once, the others when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
import typer.core
import typer.main

from oxrl import __version__
from oxrl.cli.console import run_program
from oxrl.cli.train import train

if TYPE_CHECKING:
    from typer._click.core import Command, Context


class Commands(typer.core.TyperGroup):
    """`train`, and every other command once one is asked for that is not there."""

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name not in self.commands:
            self._add_all()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Context) -> list[str]:
        self._add_all()
        return super().list_commands(ctx)

    def _add_all(self) -> None:
        # A run of `oxrl train` needs no other.
        from oxrl.cli.commands import every
        from oxrl.cli.package_commands import package_commands

        own = typer.main.get_group(every).commands
        self.commands = {**own, **package_commands(own)}


app = typer.Typer(
    name="oxrl",
    cls=Commands,
    help="Post-training of language models. "
    "Exit codes: 0 done, 2 bad input, 75 stopped and resumable, 1 other.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oxrl {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options that stand before the name of a command."""


def main() -> None:
    """Entry point of `oxrl`."""
    run_program(app)
