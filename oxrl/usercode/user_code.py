"""Code of users: found in a file without running it, run as a module, and its errors in words."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from oxrl.errors import did_you_mean, why_no_file
from oxrl.redact import masked, without_settings

# Longest text of one error, in characters: it is written for every sample.
MOST_REASON = 600


def place_in_file(name: str) -> tuple[Path, str] | None:
    """The file and the name in it, of "path.py:name"; nothing is run. None: it has not that form.

    Raises:
        ValueError: the file is not there or no Python, or surely does not define the name.
    """
    file, _, found = name.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not found.isidentifier():
        return None
    problem = why_not_defined(path, found) if path.is_file() else f"{file}: {why_no_file(path)}"
    if problem:
        raise ValueError(problem)
    return path.resolve(), found


def why_not_defined(path: Path, name: str) -> str:
    """Say why the file at `path` does not define `name`; empty where it may."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else path
        return f"{where} is not Python: {error.args[0]}"
    # Names that are imported or assigned count too: only a name found nowhere is surely wrong.
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(id=stored, ctx=ast.Store()):
                names.add(stored)
            case ast.alias(name=imported, asname=other):
                names.add(other or imported)
            case _:
                pass
    if name in names or "*" in names:
        return ""
    hint = did_you_mean(name, names) or f"; it has {', '.join(sorted(names)) or 'nothing'}"
    return f"{path} defines no '{name}'{hint}"


class WithoutCache(SourceFileLoader):
    """Loads a file as it stands; Python's cache takes one of the same size and second for it."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Say that there is nothing to compare a cache with."""
        raise OSError


def run_module(path: Path, kind: str) -> ModuleType:
    """Run a file as a module of its own, able to import what lies beside it.

    Args:
        kind: of code, in the module's name.

    Raises:
        Exception, SystemExit: whatever running it raises.
    """
    module_name = f"oxrl_{kind}_{path.stem}"
    loader = WithoutCache(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses in user code look themselves up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end: a file beside it must not replace a library
    loader.exec_module(module)
    return module


def load_function(place: str, kind: str) -> Any:
    """Load what "path.py:function" names; its file is run.

    Args:
        place: in that form.
        kind: of code, as of `run_module`.

    Raises:
        ValueError: it has not that form, or as of `place_in_file`.
        Exception, SystemExit: whatever running the file raises.
    """
    found = place_in_file(place)
    if found is None:
        raise ValueError("must be path.py:function")
    file, name = found
    return getattr(run_module(file, kind), name)


def raised_as(error: BaseException, path: Path | None) -> str:
    """An exception in words, with the last line of the user's own file on the way to it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if path and Path(frame.filename) == path]
    where = f" ({path}:{lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {capped(text_of(error), MOST_REASON)}{where}"


def capped(text: str, most: int) -> str:
    """`text`, cut to `most` characters with a note of how many are missing."""
    missing = len(text) - most
    return text if missing <= 0 else f"{text[:most]}... ({missing:,} characters more were cut)"


def text_of(error: BaseException) -> str:
    """Return an exception's text without secrets; user code may raise one that has none."""
    try:
        return masked(without_settings(str(error)))
    except Exception as second:  # noqa: BLE001 - `__str__` is the user's
        return f"(its text cannot be shown: {type(second).__name__})"


def awaited(result: object) -> object:
    """Return a function's result, waited for where the function is `async`.

    Args:
        result: anything.

    Returns:
        The value; in an event loop of its own where it had to be waited for, and where a loop runs
        already, as in a notebook, in a thread of its own.
    """
    if not inspect.isawaitable(result):
        return result
    import asyncio  # a third of the time that a reward worker takes to import

    waiting = _result_of(result)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(waiting)
    from concurrent.futures import ThreadPoolExecutor  # with the logging that it imports

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, waiting).result()


async def _result_of(waiting: Awaitable[object]) -> object:
    return await waiting
