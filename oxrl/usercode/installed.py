"""The code that installed packages offer by entry points, found without importing any of it."""

from __future__ import annotations

import sys
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from oxrl.tables.user_code import Kind

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints


def entries(kind: Kind) -> EntryPoints:
    """Return what installed packages offer, by names."""
    return _entries_in(kind.group, tuple(sys.path))


def package_of(entry: EntryPoint) -> str:
    """The name of the package that offers it."""
    return entry.dist.name if entry.dist is not None else entry.module


def module_file(module: str) -> Path | None:
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


@cache
def _entries_in(group: str, folders: tuple[str, ...]) -> EntryPoints:
    """The entry points of a group, read once as long as packages are looked for in `folders`."""
    from importlib.metadata import entry_points  # 30 ms with reading, which few names cost

    return entry_points(group=group)
