"""The code that a user's function is made of: its file, and what that imports from its folder."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import logging
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from oxrl.runs.pins import VALUE
from oxrl.types import Names
from oxrl.usercode.locate import Place

SUFFIXES = (".py", *EXTENSION_SUFFIXES)
# Calls that import what their first argument names.
IMPORTERS = ("import_module", "__import__")
UNSEEN = "a resume will not see changes of %s"
logger = logging.getLogger(__name__)


def python_sources(path: Path, module: str = "") -> dict[str, Path]:
    """The file at `path` and every file beside or below it that it imports, and those import.

    Read without running anything: a module whose name is computed is not seen, nor are data files.

    Args:
        path: a Python file; one that is no Python imports nothing.
        module: its dotted name where it is of an installed package, the files of which count.

    Returns:
        Name in the folder of `path`, or in that of packages, -> file, sorted.
    """
    folder = path.parent
    package = tuple(module.split(".")[:1]) if module else ()
    if module:
        inside = module.count(".") + (path.stem == "__init__")
        folder = path.parents[inside]
    found: dict[str, Path] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(folder).as_posix()
        if name in found:
            continue
        found[name] = file
        for imported in _imported(file, folder):
            if imported[: len(package)] == package:
                waiting += _files_of(imported, folder)
    return dict(sorted(found.items()))


def files_of(place: Place) -> dict[str, Path]:
    """The files that something of a user's is made of; none of what oxRL has, or Python gives.

    Args:
        place: of it.

    Returns:
        As of `python_sources`.
    """
    return {} if place.file is None else python_sources(place.file, place.module)


def code_digest(place: Place) -> str:
    """A hash by which a change of a user's code, or of a reward model, is noticed.

    Args:
        place: of a file: it and what it is made of are hashed; of a folder: names, sizes and times
            in it; of neither: the hash of nothing.

    Returns:
        SHA-256, 64 hexadecimal digits.

    Raises:
        OSError: something there cannot be read.
    """
    digest = hashlib.sha256()
    if place.file is not None and place.file.is_dir():
        for file in sorted(place.file.iterdir()):
            state = file.stat()
            digest.update(f"{file.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        return digest.hexdigest()
    for name, file in files_of(place).items():
        digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _imported(file: Path, folder: Path) -> Iterator[Names]:
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
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called),
                args=[ast.Constant(value=str(name)), *_],
            ) if called in IMPORTERS:
                yield tuple(name.split("."))
            case _:
                pass


def _files_of(module: Names, folder: Path) -> Iterator[Path]:
    """The files under the folder that importing a dotted name runs: packages on the way, and it."""
    for count in range(1, len(module) + 1):
        place = folder.joinpath(*module[:count])
        candidates = [place / "__init__.py"]
        candidates += [place.with_name(place.name + suffix) for suffix in SUFFIXES]
        yield from (path for path in candidates if path.is_file())


def sources_of(value: object) -> dict[str, str]:
    """The source that something given is made of, by names for messages, and values that it uses.

    Of a module's function these are the module's file and those that it imports from its folder. Of
    one from a script or a notebook, whose text may say `resume=True` the next time, it is the text
    of the function and of the functions and classes of the same place that it uses. Either way
    arguments of a partial, fields, globals and closures are among them; what is no JSON there is
    told.

    Args:
        value: a function, a class, a `functools.partial`, or an object, of which its class counts.

    Returns:
        Name for messages -> text, of values JSON; names of values begin with VALUE.
    """
    inner = inspect.unwrap(getattr(value, "func", value))  # pyright: ignore
    texts: dict[str, str] = {}
    if isinstance(value, partial):
        _add_value("arguments", [value.args, value.keywords], texts)
    holder = getattr(inner, "__self__", inner)
    if not inspect.isclass(holder):
        for name, held in getattr(holder, "__dict__", {}).items():
            _add_value(name, held, texts)
    if not (inspect.isroutine(inner) or inspect.isclass(inner)):
        inner = type(inner)
    _add_source(inner, texts)
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    whole = module is not None and module.__name__ != "__main__" and file is not None
    if whole and "<locals>" not in getattr(inner, "__qualname__", ""):
        values = {name: texts[name] for name in texts if name.startswith(VALUE)}
        found = python_sources(Path(str(file)))
        return values | {name: path.read_text("utf-8", "replace") for name, path in found.items()}
    return texts


def _add_value(name: str, value: object, texts: dict[str, str]) -> None:
    """A value that code uses, as JSON; told where it has none."""
    try:
        texts[VALUE + name] = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        logger.warning(UNSEEN, f"{name} ({type(value).__name__}), which code uses")


def _source_of(value: Any) -> str:
    """The text of a function or class; empty where there is none."""
    try:
        source = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):  # typed into an interpreter, made by `exec` or by a library
        return ""
    code = getattr(value, "__code__", None)
    # Python 3.13 takes the program behind `python -c` for the file of all that `exec` made.
    guessed = code is not None and code.co_filename == "<string>"
    return "" if guessed and value.__name__.strip("<>") not in source else source


def _add_source(value: Any, texts: dict[str, str]) -> None:
    """The text of a function or class, and of what it uses of its own module."""
    name = getattr(value, "__name__", "")
    if name in texts:
        return
    source = _source_of(value)
    if source:
        texts[name] = source
    else:
        logger.warning(UNSEEN, f"{name or type(value).__name__}, which has no source here")
    functions = [value]
    if inspect.isclass(value):
        functions = [member for _, member in inspect.getmembers(value, inspect.isfunction)]
    for function in functions:
        code = getattr(function, "__code__", None)
        if code is None:
            continue
        defaults = [function.__defaults__, function.__kwdefaults__]
        if any(defaults):
            _add_value(f"defaults of {name}", defaults, texts)
        names = dict(function.__globals__)
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing is assigned to it yet
                names[free] = cell.cell_contents
        read = set(names_in(code))
        for used in sorted(names.keys() & read):
            other = names[used]
            if isinstance(other, ModuleType):
                _add_module(other, read, texts)
            own = getattr(other, "__module__", None) == value.__module__
            if own and (inspect.isfunction(other) or inspect.isclass(other)):
                _add_source(other, texts)
            elif not isinstance(other, (type, ModuleType)) and not inspect.isroutine(other):
                _add_value(f"{used} in {name}", other, texts)


def _add_module(module: ModuleType, read: set[str], texts: dict[str, str]) -> None:
    """The files of a module of the user's, and its values that code may read by these names."""
    file = Path(getattr(module, "__file__", None) or "")
    installed = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    if file.suffix != ".py" or any(map(file.is_relative_to, installed)):
        return
    sources = python_sources(file, module.__name__).items()
    texts |= {VALUE + name: path.read_text("utf-8", "replace") for name, path in sources}
    for name in sorted(vars(module).keys() & read):
        value = vars(module)[name]
        if not callable(value) and not isinstance(value, ModuleType):
            _add_value(f"{module.__name__}.{name}", value, texts)


def names_in(code: CodeType) -> Iterator[str]:
    """Names of globals, closures and attributes that a function uses, also in functions in it.

    Args:
        code: of a function.

    Returns:
        Names, some perhaps more than once.
    """
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
