"""The code that a user's function is made of: its file, and what that imports from its folder."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

SUFFIXES = (".py", *EXTENSION_SUFFIXES)
# Calls that import what their first argument names.
IMPORTERS = ("import_module", "__import__")


def python_sources(path: Path) -> dict[str, Path]:
    """The file at `path` and every file beside or below it that it imports, and those import.

    Read without running anything: a module whose name is computed is not seen, nor are data files.

    Returns:
        Name in the folder of `path` -> file, sorted.
    """
    folder = path.parent
    found: dict[str, Path] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(folder).as_posix()
        if name in found:
            continue
        found[name] = file
        for module in _imported(file, folder):
            waiting += _files_of(module, folder)
    return dict(sorted(found.items()))


def code_digest(path: Path) -> str:
    """A hash of what `python_sources` finds; of a model's folder, of the sizes and times in it."""
    digest = hashlib.sha256()
    if path.is_dir():
        for file in sorted(path.iterdir()):
            state = file.stat()
            digest.update(f"{file.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    elif path.is_file():
        for name, file in python_sources(path).items():
            digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _imported(file: Path, folder: Path) -> Iterator[tuple[str, ...]]:
    """The parts of every dotted name that the file imports, as seen from the folder."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError):
        return  # whoever imports it says so
    package = file.relative_to(folder).parent.parts
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (tuple(alias.name.split(".")) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                start = package[: len(package) - level + 1] if level else ()
                origin = (*start, *(module.split(".") if module else ()))
                yield origin
                yield from ((*origin, alias.name) for alias in names)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if _is_importer(node.func):
                yield tuple(name.split("."))
            case _:
                pass


def _is_importer(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in IMPORTERS


def _files_of(module: tuple[str, ...], folder: Path) -> Iterator[Path]:
    """The files under the folder that importing a dotted name runs: packages on the way, and it."""
    for count in range(1, len(module) + 1):
        place = folder.joinpath(*module[:count])
        candidates = [place / "__init__.py"]
        candidates += [place.with_name(place.name + suffix) for suffix in SUFFIXES]
        yield from (path for path in candidates if path.is_file())
