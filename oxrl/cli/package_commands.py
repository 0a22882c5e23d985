"""Commands that packages offer: listed without an import of any of them, read when asked for."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.core
import typer.main

from oxrl.entry_points import COMMANDS, OURS, Offer, all_offers
from oxrl.errors import ConfigError
from oxrl.redact import shown

if TYPE_CHECKING:
    from typer._click.core import Context


class PackageCommand(typer.core.TyperCommand):
    """A function of a package, which becomes a command once it is asked for.

    Args:
        offers: of its name; more than one is an error of whoever asks for it.
    """

    def __init__(self, offers: list[Offer]) -> None:
        super().__init__(offers[0].name, callback=None)
        self.offers = offers

    @property
    def is_of_others(self) -> bool:
        """True if oxRL has no command of that name."""
        return self.offers[0].package != OURS

    def get_short_help_str(self, limit: int = 45) -> str:
        """Read the line that `oxrl --help` shows.

        Args:
            limit: most letters of it.
        """
        self.help = described(self.offers[0])
        return super().get_short_help_str(limit)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Context | None = None, **extra: Any
    ) -> Context:
        """Import the function, and read the arguments as it declares them.

        Raises:
            ConfigError: it cannot be imported, or several packages have a command of this name.
        """
        offer, *others = self.offers
        if others and self.is_of_others:
            packages = ", ".join(one.package for one in self.offers)
            raise ConfigError(
                f"several installed packages offer a command {info_name!r}: {packages}; "
                "uninstall all but one"
            )
        with offer.asked() as function:
            program = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
            program.command(offer.name)(function)
            command = typer.main.get_command(program)
        return command.make_context(info_name, args, parent, **extra)


def package_commands(known: Collection[str]) -> dict[str, PackageCommand]:
    """Every command of a package by its name, oxRL's first.

    Args:
        known: names of the core's own, which no package takes.
    """
    found: dict[str, list[Offer]] = {}
    for offer in all_offers(COMMANDS):
        if offer.name not in known:
            found.setdefault(offer.name, []).append(offer)
    return {name: PackageCommand(offers) for name, offers in found.items()}


def described(offer: Offer) -> str:
    """The first line of a function's documentation, read from its file."""
    module, _, name = offer.place.partition(":")
    told = f"Of the package {offer.package}."
    root, *inner = module.split(".")
    spec = find_spec(root)
    if spec is None or spec.origin is None:
        return told
    path = Path(spec.origin)
    if inner:
        path = path.parent.joinpath(*inner).with_suffix(".py")
    return shown(_documented(path).get(name) or told)


@cache
def _documented(path: Path) -> Mapping[str, str | None]:
    """The documentation of every function in a file."""
    try:
        nodes = ast.parse(path.read_text("utf-8")).body
    except (OSError, SyntaxError, ValueError):  # told when it is asked for
        return {}
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) for node in functions}
