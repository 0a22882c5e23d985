"""Functions and classes that a program hands over as they are: found by a name, sent to workers.

A configuration holds names. What `oxrl.train` is given has the name `python:NAME`, and stands here
for as long as the run, or whatever else uses it, goes on in this process. A worker gets it from its
parent, as bytes on the socket between the two: nothing of that kind is ever read from a file, or
from what a worker says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oxrl.types import Objects, Values

PREFIX = "python:"
FIELD = "given"
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


def take(name: str, value: object) -> None:
    """In a worker: let a name stand for what its parent sent."""
    _here[name] = value
