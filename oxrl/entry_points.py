"""The code that packages offer by entry points, found without importing any of it.

What is installed may be anything. So a package of others is asked for something only where a run
names it or a command lists what there is, a name of oxRL's own stays oxRL's, and whatever reading
or asking raises becomes a sentence that says which package it was.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from oxrl.errors import ConfigError
from oxrl.redact import shown
from oxrl.tables.user_code import Kind

if TYPE_CHECKING:
    from importlib.metadata import Distribution

log = logging.getLogger(__name__)
OURS = "oxrl"
# The entry points of commands.
COMMANDS = "oxrl.commands"
# Those of functions that say how sure the figures of an evaluation are.
STATISTICS = "oxrl.statistics"
# Those of features that rows of the table need, beside the core's.
ROW_FEATURES = "oxrl.row_features"
# Those of what asks a teacher that is no model of this run.
TEACHER_ENGINES = "oxrl.teacher_engines"
# Those of functions that have further lines for `oxrl plan`.
PLANNERS = "oxrl.planners"
# In a checkout it says what there is; what was installed of it may be older.
PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
# What the core has itself, where nothing says what is installed.
CORE = {
    "oxrl.rewards": {"exact": "oxrl.rewards.builtin:EXACT"},
    "oxrl.environments": {"tools": "oxrl.environments.tool_environment:ToolEnvironment"},
}


class Offer(NamedTuple):
    """Something that a package offers, under a name.

    place: "module:attribute", or whatever its metadata say. package: that is installed.
    """

    name: str
    place: str
    package: str = OURS

    @contextmanager
    def asked(self) -> Iterator[Any]:
        """Import it for a block that uses it; what that raises in a package of others is told.

        Raises:
            ConfigError: whatever it raised, with the name of the package.
        """
        try:
            yield resolve_name(self.place)
        except (Exception, SystemExit) as error:
            if self.package == OURS:
                raise
            raise self.problem(f"raised {type(error).__name__}: {error}") from error

    def problem(self, text: str) -> ConfigError:
        """Return an error that says what is wrong with it."""
        said = f"{self.name!r}, which the installed package {self.package} offers ({self.place})"
        return ConfigError(shown(f"{said}, {text:.600}"))


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

        try:
            stated = tomllib.loads(PROJECT.read_text("utf-8")).get("project", {})
            if stated.get("name") == OURS:
                return stated["entry-points"].get(group, {})
        except (AttributeError, KeyError, ValueError) as error:
            log.warning("%s cannot be read: %s; what is installed counts", PROJECT, error)
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


def own_function(group: str, name: str) -> Callable[..., Any] | None:
    """Import a function of the packages beside the core.

    Args:
        group, name: of its entry point.

    Returns:
        None where nothing says that it is there: on a node that the core alone was sent to.

    Raises:
        ConfigError: a package that it needs is not installed.
    """
    place = own_offers(group).get(name)
    if place is None:
        return None
    try:
        return resolve_name(place)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{place}: {error}; install oxRL with pip, which brings it") from error


def all_offers(group: str) -> list[Offer]:
    """Return what oxRL and every installed package offer, oxRL's first.

    Args:
        group: of entry points.
    """
    own = [Offer(name, place) for name, place in own_offers(group).items()]
    return own + _all_offers(group, tuple(sys.path))


def refuse_taken(group: str, name: str) -> None:
    """Refuse a package of others that offers something under a name of oxRL's.

    Args:
        group: of entry points.
        name: that oxRL has.

    Raises:
        ConfigError: one does; names it.
    """
    for offer in all_offers(group):
        if offer.name == name and offer.package != OURS:
            raise offer.problem(
                "has a name that is oxRL's own: uninstall that package, or have it offer another "
                f"name under [{group}]"
            )


@cache
def _all_offers(group: str, folders: tuple[str, ...]) -> list[Offer]:
    """Those of others, read once as long as packages are looked for in `folders`."""
    # 80 ms with reading, which few names cost.
    from importlib.metadata import distributions

    found: dict[Offer, None] = {}
    for package in distributions():
        try:
            entries = package.entry_points.select(group=group)
            name = _name_of(package) if entries else ""
            offers = [Offer(entry.name, entry.value, name) for entry in entries]
        except Exception as error:  # noqa: BLE001 - what is written there may be anything
            folder = package.locate_file("")
            what = f"a package in {folder} offers nothing: its metadata cannot be read"
            log.warning(shown(f"{what}: {type(error).__name__}: {error}"))
            continue
        found |= {offer: None for offer in offers if offer.package != OURS}
    return list(found)


def _name_of(package: Distribution) -> str:
    """The name of an installed package; its metadata may hold none, or not be there."""
    with suppress(Exception):
        return str(package.name)
    return "without a name"
