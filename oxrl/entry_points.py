"""The code that packages offer by entry points, found without importing any of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from oxrl.tables.user_code import Kind

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

OURS = "oxrl"
# In a checkout it says what there is; what was installed of it may be older.
PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
# What the core has itself, where nothing says what is installed.
CORE = {
    "oxrl.rewards": {"exact": "oxrl.rewards.builtin:EXACT"},
    "oxrl.environments": {"tools": "oxrl.environments.tool_environment:ToolEnvironment"},
}


@cache
def own_offers(group: str) -> Mapping[str, str]:
    """Return what oxRL itself offers, in its core and in the packages beside it.

    Args:
        group: of entry points, "oxrl.rewards".

    Returns:
        Name -> place, "module:attribute"; nothing else that is installed is looked at.
    """
    if PROJECT.is_file():
        import tomllib  # of a checkout alone

        stated = tomllib.loads(PROJECT.read_text("utf-8")).get("project", {})
        if stated.get("name") == OURS:
            return stated["entry-points"].get(group, {})
    from importlib.metadata import PackageNotFoundError, distribution  # of what is installed

    try:
        found = distribution(OURS).entry_points.select(group=group)
    except PackageNotFoundError:  # on a node that the package alone was sent to
        return CORE.get(group, {})
    return {entry.name: entry.value for entry in found}


def is_ours(kind: Kind, name: str) -> bool:
    """True if oxRL has something itself, in the core or in a package beside it.

    Args:
        kind: of code.
        name: by which a configuration names it.
    """
    # What is in a file, or given by Python, has a colon in its name.
    return ":" not in name and name in own_offers(kind.group)


def own_thing(kind: Kind, name: str) -> Any:
    """Import something that oxRL has itself.

    Args:
        kind: of code.
        name: for which `is_ours` is true.

    Raises:
        OxrlError: `kind.error`: a package that it needs is not there.
    """
    try:
        return resolve_name(own_offers(kind.group)[name])
    except ModuleNotFoundError as error:
        raise kind.problem(
            name,
            f"{error}: install oxRL with pip, or add packages/ of its repository to PYTHONPATH",
        ) from error


def all_offers(group: str) -> list[EntryPoint]:
    """Return what oxRL and every installed package offer, oxRL's first.

    Args:
        group: of entry points.
    """
    return _all_offers(group, tuple(sys.path))


@cache
def _all_offers(group: str, folders: tuple[str, ...]) -> list[EntryPoint]:
    """The same, read once as long as packages are looked for in `folders`."""
    # 80 ms with reading, which few names cost.
    from importlib.metadata import EntryPoint, entry_points

    own = [EntryPoint(name, place, group) for name, place in own_offers(group).items()]
    others = [entry for entry in entry_points(group=group) if package_of(entry) != OURS]
    return own + others


def package_of(entry: EntryPoint) -> str:
    """Return the name of the installed package that offers something."""
    return entry.dist.name if entry.dist is not None else entry.module
