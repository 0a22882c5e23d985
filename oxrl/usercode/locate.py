"""The place of something that a configuration names, found without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from oxrl.errors import did_you_mean
from oxrl.tables.user_code import Kind

OURS = "oxrl"


class Place(NamedTuple):
    """The place of something that a configuration names.

    file: that holds it; None of what oxRL has itself, and of what Python gives. name: in there.
    module: that is imported; empty of a file of its own. ours: oxRL has it itself.
    """

    file: Path | None = None
    name: str = ""
    module: str = ""
    ours: bool = False


def is_ours(kind: Kind, name: str) -> bool:
    """True if oxRL has something itself, in the core or in a package beside it."""
    if name in kind.table or ":" in name:
        return name in kind.table
    from oxrl.usercode.installed import entries, package_of  # for what the core does not have

    return [package_of(entry) for entry in entries(kind).select(name=name)] == [OURS]


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
        name: in the table of the kind, of what Python gives, "path.py:name", or of what an
            installed package offers.

    Raises:
        ValueError: nothing has that name; or its file is not there, no Python, or surely does not
            define it.
    """
    if name in kind.table:
        module, _, found = kind.table[name].partition(":")
        return Place(name=found, module=module, ours=True)
    # What the core has does without.
    from oxrl.usercode.given import given, is_given
    from oxrl.usercode.user_code import place_in_file

    if is_given(name):
        given(name, kind.noun)
        return Place()
    in_file = place_in_file(name)
    return _installed(kind, name) if in_file is None else Place(*in_file)


def _installed(kind: Kind, name: str) -> Place:
    """Find the place of something that an installed package offers.

    Raises:
        ValueError: none offers it, or two do.
    """
    from oxrl.usercode.installed import entries, module_file, package_of

    found = list(entries(kind).select(name=name))
    if not found:
        known = [*kind.table, *sorted(entries(kind).names)]
        forms = kind.forms.format(", ".join(known))
        raise ValueError(f"must be {forms}{did_you_mean(name, known)}")
    packages = sorted(map(package_of, found))
    if len(found) > 1:
        rule = "uninstall one of them, or write path.py:name"
        raise ValueError(f"is offered by two packages, {' and '.join(packages)}: {rule}")
    module = found[0].module
    ours = packages == [OURS]
    return Place(None if ours else module_file(module), found[0].attr, module, ours)
