"""Code of the user's own that a run reads, and the files that options name: rewards, environments,
losses and features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from oxrl.rewards.base import ARGUMENT
from oxrl.rewards.base import locate as locate_reward
from oxrl.runs.files import Json
from oxrl.runs.pins import Input
from oxrl.usercode.given import given, is_given
from oxrl.usercode.sources import python_sources, sources_of


def reward_code(name: str, field: str) -> Iterator[Input]:
    """A reward's file with what it imports from its folder, or what a program gave.

    Args:
        name: of the reward.
        field: of the config, which says so.
    """
    if is_given(name):
        texts = sources_of(given(name, ARGUMENT))
        yield Input(name=field, where=name, texts=texts, code=True)
        return
    place, _ = locate_reward(name)
    yield Input(name=field, where=str(place), files=python_sources(place), code=True)


def environment_inputs(name: str, options: Json) -> Iterator[Input]:
    """An environment's file with what it imports from its folder, and files that options name."""
    # Rewards and losses of the user's own do without.
    from oxrl.usercode.environments import ARGUMENT as AS_ENVIRONMENT
    from oxrl.usercode.environments import locate as locate_environment

    place, _ = locate_environment(name)
    if is_given(name):
        texts = sources_of(given(name, AS_ENVIRONMENT))
        yield Input(name="environment.name", where=name, texts=texts, code=True)
    elif place is not None:
        files = python_sources(place)
        yield Input(name="environment.name", where=str(place), files=files, code=True)
    named: dict[str, Path] = {}
    for text in _texts_in(options):
        named |= _files_named(text)
    if named:
        where = ", ".join(map(str, named.values()))
        yield Input(name="environment.options", where=where, files=named)


def _texts_in(options: Json) -> Iterator[str]:
    """Every text in options, however deep."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, (dict, list, tuple)):
        for value in options.values() if isinstance(options, dict) else options:
            yield from _texts_in(value)


def _files_named(text: str) -> dict[str, Path]:
    """The files that an option means, as a path or as "path.py:name"; none where it is no place."""
    code, separator, _ = text.rpartition(":")
    try:
        if separator and code.endswith(".py") and Path(code).is_file():
            file = Path(code).resolve()
            return {str(file.parent / name): path for name, path in python_sources(file).items()}
        return {text: Path(text).resolve()} if Path(text).is_file() else {}
    except (OSError, ValueError):  # too long for a path, or none at all
        return {}


def own_code(field: str, names: Sequence[str], kind: str) -> Iterator[Input]:
    """Code of the user's beside rewards and environments: of files, or given by a program.

    Args:
        field: of the config, which names it.
        names: path.py:name, or what Python gives.
        kind: argument of `oxrl.train` that gives it.
    """
    files: dict[str, Path] = {}
    texts: dict[str, str] = {}
    places: list[str] = []
    for name in names:
        if is_given(name):
            places.append(name)
            texts |= sources_of(given(name, kind))
            continue
        file = Path(name.rpartition(":")[0]).resolve()
        found = python_sources(file)
        places.append(str(file))
        if len(names) > 1:
            found = {str(file.parent / inner): path for inner, path in found.items()}
        files |= found
    if names:
        where = ", ".join(places)
        yield Input(name=field, where=where, files=files, texts=texts, code=True)
