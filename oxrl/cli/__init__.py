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
from oxrl.entry_points import COMMANDS, refuse_taken

if TYPE_CHECKING:
    from collections.abc import Collection

    from typer._click.core import Command, Context


class Commands(typer.core.TyperGroup):
    """`train`, and every other command once one is asked for that is not there."""

    # Names that packages of others have alone.
    of_others: Collection[str] = ()

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name not in self.commands:
            self._add_all()
        if cmd_name not in self.of_others:
            refuse_taken(COMMANDS, cmd_name)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Context) -> list[str]:
        self._add_all()
        return super().list_commands(ctx)

    def _add_all(self) -> None:
        # A run of `oxrl train` needs no other.
        from oxrl.cli.commands import every  # all others
        from oxrl.cli.package_commands import package_commands  # of what is installed

        own = typer.main.get_group(every).commands
        found = package_commands(own)
        self.of_others = {name for name, command in found.items() if command.is_of_others}
        self.commands = {**own, **found}


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
