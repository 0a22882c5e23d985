"""The place of something that a configuration names, found without running anything."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from oxrl.entry_points import all_offers, is_ours, own_offers
from oxrl.errors import did_you_mean, shortened
from oxrl.redact import shown
from oxrl.tables.user_code import Kind
from oxrl.usercode.given import given, is_given
from oxrl.usercode.user_code import place_in_file

# Of other packages, in an error.
MOST_NAMES = 100


class Place(NamedTuple):
    """The place of something that a configuration names.

    file: that holds it; None of what oxRL has itself, and of what Python gives. name: in there.
    module: that is imported; empty of a file of its own. ours: oxRL has it itself.
    """

    file: Path | None = None
    name: str = ""
    module: str = ""
    ours: bool = False


def names_of(kind: Kind) -> list[str]:
    """The names of a kind, for errors: what oxRL has, then what other packages offer."""
    own = own_offers(kind.group)
    offered = {offer.name for offer in all_offers(kind.group)}
    others = sorted(offered.difference(own))[:MOST_NAMES]
    return [*own, *(shortened(shown(name)) for name in others)]


def forms_of(kind: Kind) -> str:
    """Say in words all that a configuration may name of a kind."""
    return kind.forms.format(", ".join(names_of(kind)))


def locate(kind: Kind, name: str) -> Place:
    """Say where something is, without running anything.

    Args:
        kind: of code.
        name: as of `place_of`.

    Raises:
        OxrlError: `kind.error`: as of `place_of`.
    """
    try:
        return place_of(kind, name)
    except ValueError as error:
        raise kind.problem(name, str(error)) from error


def place_of(kind: Kind, name: str) -> Place:
    """The same, for who tells the problem otherwise.

    Args:
        kind: of code.
        name: of what oxRL has itself, of what Python gives, "path.py:name", or of what an installed
            package offers.

    Raises:
        ValueError: nothing has that name; or its file is not there, no Python, or surely does not
            define it.
    """
    if is_ours(kind, name):
        module, _, found = own_offers(kind.group)[name].partition(":")
        return Place(name=found, module=module, ours=True)
    if is_given(name):
        given(name, kind.noun)
        return Place()
    in_file = place_in_file(name)
    return _installed(kind, name) if in_file is None else Place(*in_file)


def _installed(kind: Kind, name: str) -> Place:
    """Find the place of something that a package of others offers.

    Raises:
        ValueError: none offers it, or two do.
    """
    found = [offer for offer in all_offers(kind.group) if offer.name == name]
    if not found:
        raise ValueError(f"must be {forms_of(kind)}{did_you_mean(name, names_of(kind))}")
    if len(found) > 1:
        packages = " and ".join(sorted(offer.package for offer in found))
        rule = "uninstall one of them, or write path.py:name"
        raise ValueError(f"is offered by two packages, {packages}: {rule}")
    # What stands in brackets behind it are extras of the package.
    place = found[0].place.partition("[")[0].strip()
    module, _, attribute = place.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ValueError(str(found[0].problem("is no module:attribute")))
    return Place(_module_file(module), attribute, module)


def _module_file(module: str) -> Path | None:
    """Find the file of a module without importing it; None where there is none in Python.

    Args:
        module: dotted name.
    """
    top, *inner = module.split(".")
    spec = find_spec(top)
    for name in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
    origin = "" if spec is None else spec.origin or ""
    return Path(origin) if origin.endswith(".py") else None
