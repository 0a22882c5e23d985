"""Code of users that a run reads, and the files that an environment's options name, as inputs whose
bytes are noted when the run starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from oxrl.runs.files import Json
from oxrl.runs.pins import Input
from oxrl.tables.user_code import Kind
from oxrl.usercode.given import given, is_given
from oxrl.usercode.locate import locate
from oxrl.usercode.sources import files_of, python_sources, sources_of


def code_inputs(kind: Kind, names: Sequence[str], field: str) -> Iterator[Input]:
    """Yield the inputs that a field of the config names: files with what they import, or objects
    that a program gave.

    Args:
        kind: of code.
        names: as of `locate`; of what oxRL has itself nothing is an input.
        field: of the config.
    """
    files: dict[str, Path] = {}
    texts: dict[str, str] = {}
    places: list[str] = []
    for name in names:
        if is_given(name):
            places.append(name)
            texts |= sources_of(given(name, kind.noun))
            continue
        place = locate(kind, name)
        found = files_of(place)
        if len(names) > 1:
            found = {f"{file} of {name}": path for file, path in found.items()}
        if place.file is not None:
            places.append(str(place.file))
        files |= found
    if places:
        where = ", ".join(places)
        yield Input(name=field, where=where, files=files, texts=texts, code=True)


def option_files(field: str, options: Json) -> Iterator[Input]:
    """The files that options of an environment, or numbers of features, name.

    Args:
        field: of the config.
        options: that stand there.
    """
    named: dict[str, Path] = {}
    for text in _texts_in(options):
        named |= _files_named(text)
    if named:
        where = ", ".join(map(str, named.values()))
        yield Input(name=field, where=where, files=named)


def _texts_in(options: Json) -> Iterator[str]:
    """Every text in options, however deep."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, (dict, list, tuple)):
        for value in options.values() if isinstance(options, dict) else options:
            yield from _texts_in(value)


def _files_named(text: str) -> dict[str, Path]:
    """The files that an option means, as a path or as "path.py:name"; none where it is no place."""
    code = text.rpartition(":")[0]
    try:
        if code.endswith(".py") and Path(code).is_file():
            return {str(path): path for path in python_sources(Path(code).resolve()).values()}
        return {text: Path(text).resolve()} if Path(text).is_file() else {}
    except (OSError, ValueError):  # too long for a path, or none at all
        return {}
