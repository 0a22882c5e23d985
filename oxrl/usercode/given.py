"""Functions and classes that a program hands over as they are: found by a name, sent to workers.

A configuration holds names. What `oxrl.train` is given has the name `python:NAME`, and stands here
for as long as the run, or whatever else uses it, goes on in this process. A worker gets it from its
parent, as bytes on the socket between the two: nothing of that kind is ever read from a file, or
from what a worker says.
"""

from __future__ import annotations

import base64
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from oxrl.tables.user_code import Kind
from oxrl.types import Objects, Values
from oxrl.usercode.messages import Json
from oxrl.usercode.user_code import raised_as

PREFIX = "python:"
FIELD = "given"
# Largest object that is sent to a worker, in bytes: a larger one holds data, and every worker
# would hold a copy of it.
MOST_SENT = 1 << 26
KEPT_HERE = (
    "{} holds something that cannot be sent to another process, such as an open file, a lock or "
    "much data: it is called in this one, one call after the other, and cannot be killed when it "
    "hangs"
)

_here: Values = {}


def is_given(name: str) -> bool:
    """True if a name of the configuration stands for something that Python gives."""
    return name.startswith(PREFIX)


def is_here(name: str) -> bool:
    """True if something in this process stands for a name."""
    return name in _here


def name_of(value: object) -> str:
    """The name that something given has in the configuration."""
    inner = getattr(value, "func", value)  # of a partial
    return PREFIX + str(getattr(inner, "__name__", type(inner).__name__))


@contextmanager
def giving(objects: Objects) -> Iterator[None]:
    """Inside, every name stands for its object."""
    before = dict(_here)
    _here.update(objects)
    try:
        yield
    finally:
        _here.clear()
        _here.update(before)


def given(name: str, argument: str) -> Any:
    """Return what a name stands for in this process.

    Args:
        argument: of `oxrl.train` by which it is given, for the error.

    Raises:
        ValueError: nothing here has that name; says how to give it.
    """
    if name not in _here:
        found = name.removeprefix(PREFIX)
        raise ValueError(
            "is Python's: a program gave it to oxrl.train, and no file holds it. Go on from "
            f"Python: oxrl.train(..., {argument}={found}, resume=True)"
        )
    return _here[name]


def packed(value: object) -> Json | None:
    """Pack an object so that a worker can make the same; None where it cannot leave this process.

    A module that a worker would not find is sent with it: what lies in `__main__`, in a notebook,
    or in a file that was loaded by its path.
    """
    import cloudpickle  # a tenth of a second, which only this costs

    module = sys.modules.get(getattr(value, "__module__", None) or "")
    apart = None if module is None or _importable(module) else module
    try:
        if apart is not None:
            cloudpickle.register_pickle_by_value(apart)
        try:
            data = cloudpickle.dumps(value)
        finally:
            if apart is not None:
                cloudpickle.unregister_pickle_by_value(apart)
    except Exception:  # noqa: BLE001 - whatever the user's objects raise, they stay here
        return None
    if len(data) > MOST_SENT:
        return None
    # A worker has the folders of this process to import from, but for the current one.
    paths = [os.getcwd()] if "" in sys.path else []
    return {"data": base64.b64encode(data).decode("ascii"), "paths": paths}


def unpacked(message: Json) -> Any:
    """Unpack what `packed` made a message of.

    Raises:
        Exception: whatever importing the modules that it needs raises.
    """
    import cloudpickle

    sys.path += [path for path in message["paths"] if path not in sys.path]
    return cloudpickle.loads(base64.b64decode(message["data"]))


def _importable(module: ModuleType) -> bool:
    """True if a fresh process finds the module by its name, in the same place."""
    if module.__name__ == "__main__":
        return True  # cloudpickle sends what lies there of its own accord
    top = module.__name__.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return True
    loaded = sys.modules.get(top)
    found = importlib.machinery.PathFinder.find_spec(top)
    if loaded is None or found is None:
        return False
    return found.origin == getattr(loaded, "__file__", None)


def load_request(kind: Kind, name: str, options: Objects) -> Json:
    """Make the first request to a process.

    Args:
        kind: of code.
        name: as of `locate`.
        options: that it is called with.

    Returns:
        JSON; under FIELD what Python gives, where that can leave this process.
    """
    request: Json = {"name": name, "options": dict(options)}
    sent = packed(given(name, kind.noun)) if is_given(name) else None
    if sent is not None:
        request[FIELD] = sent
    return request


def take_given(kind: Kind, request: Json, cannot: str) -> None:
    """In the process: take what the parent was given itself, if its request brings it.

    Args:
        kind: of code.
        request: as of `load_request`.
        cannot: be done, in words, where it cannot be made again here.

    Raises:
        OxrlError: `kind.error`: it cannot.
    """
    if FIELD not in request:
        return
    name = request["name"]
    try:
        _here[name] = unpacked(request[FIELD])
    except Exception as error:  # any: loading it may import modules of the user's
        raise kind.problem(name, f"{cannot}: {raised_as(error, None)}") from error
