"""Plain data as JSON and back: all that passes between judged code and the code that judges it.

A list, a number or a text arrives as itself, of the exact built-in type, whatever class it had and
whatever that class says of equality. Anything else arrives as a reference without a value.
"""

from __future__ import annotations

import array
import base64
import builtins
import collections
import collections.abc
import datetime
import decimal
import fractions
import json
import os
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

# Deepest nesting and longest message, in bytes.
MOST_DEPTH = 200
MOST_BYTES = 16 << 20
# Bytes that say how long a message is.
LENGTH = 4
_SMALL = 1 << 53

# What JSON can hold; and what was decoded from it, which nobody knows before looking.
Wire = Any
Json = dict[str, Wire]
Keep = Callable[[object], list[Wire]]


class NotPlain(TypeError):
    """A value that is no plain data, where only that may pass."""


class TooLong(Exception):
    """A message above MOST_BYTES."""


class Closed(Exception):
    """The other end is gone."""


def refuse(value: object) -> list[Wire]:
    """The `keep` of a side that has no references to give out.

    Args:
        value: what would have needed one.

    Raises:
        NotPlain: always.
    """
    raise NotPlain(f"{type(value).__name__} is no plain data")


def encode(value: object, keep: Keep, depth: int = 0) -> Wire:
    """Lay out a value as JSON values.

    Args:
        value: anything.
        keep: makes a reference to what is no plain data, or raises NotPlain.
        depth: how deep it is nested.

    Returns:
        What `decode` makes the value of again, and `json.dumps` takes.

    Raises:
        NotPlain: it is nested too deeply, or `keep` said so.
    """
    if value is None or value is True or value is False:
        return value
    if depth > MOST_DEPTH:
        raise NotPlain(f"nested more than {MOST_DEPTH} deep")
    match value:
        case str():
            return str.__str__(value)
        case int():
            number = int.__int__(value)
            return number if -_SMALL < number < _SMALL else ["int", hex(number)]
        case float():
            return float.__float__(value)
        case complex():
            return ["complex", value.real, value.imag]
        case bytes() | bytearray():
            kind = "bytes" if isinstance(value, bytes) else "bytearray"
            return [kind, base64.b64encode(value).decode()]
        case range():
            return ["range", *map(encode, (value.start, value.stop, value.step), repeat(keep))]
        case _:
            return _encode_other(value, keep, depth)


_CONTAINERS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": (set, collections.abc.KeysView, collections.abc.ItemsView),
    "frozenset": frozenset,
    "deque": collections.deque,
}
# Classes of the standard library whose text says everything; not their subclasses.
_TEXTS = (
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.datetime,
)


def _encode_other(value: Wire, keep: Keep, depth: int) -> Wire:
    """A container, or an object of the standard library; else what `keep` makes of it."""

    def each(items: Iterable[object]) -> list[Wire]:
        return [encode(item, keep, depth + 1) for item in items]

    if isinstance(value, dict):
        return ["dict", *each(part for pair in value.items() for part in pair)]
    for name, kinds in _CONTAINERS.items():
        if isinstance(value, kinds):
            return [name, *each(value)]
    kind = type(value)
    if isinstance(value, array.array):
        return ["array", value.typecode, *each(value)]
    if kind in _TEXTS:
        return [kind.__name__.lower(), str(value)]
    if kind is type and getattr(builtins, getattr(value, "__name__", ""), None) is value:
        return ["type", value.__name__]
    if kind is datetime.timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    return keep(value)


def decode(data: Wire, find: Callable[[list[Wire]], object]) -> Wire:
    """Build the value that `encode` laid out.

    Args:
        data: JSON values.
        find: turns a reference into whatever stands for it here.

    Returns:
        A value of built-in types, with whatever `find` gave inside.

    Raises:
        ValueError, TypeError, KeyError, IndexError: it is no layout of a value.
    """
    if not isinstance(data, list):
        return data
    kind, *rest = data
    if kind == "object":
        return find(rest)
    if kind in _FROM_PARTS:
        return _FROM_PARTS[kind](*rest)
    items = [decode(item, find) for item in rest]
    if kind == "dict":
        return dict(zip(items[::2], items[1::2], strict=True))
    return _FROM_ITEMS[kind](items)


def _builtin_type(name: str) -> type:
    found = getattr(builtins, name)
    if not isinstance(found, type):
        raise TypeError(f"{name} is no type")
    return found


_FROM_PARTS: dict[str, Callable[..., Wire]] = {
    "int": lambda text: int(text, 16),
    "complex": complex,
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "decimal": decimal.Decimal,
    "fraction": fractions.Fraction,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "timedelta": datetime.timedelta,
    "type": _builtin_type,
}
_FROM_ITEMS: dict[str, Callable[[list[Wire]], Wire]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "array": lambda items: array.array(items[0], items[1:]),
    "range": lambda items: range(*items),
}


def frame(message: object) -> bytes:
    """A message as it is sent: LENGTH bytes with its length, big-endian, then JSON.

    Args:
        message: what `json.dumps` takes.
    """
    text = json.dumps(message).encode()
    return len(text).to_bytes(LENGTH, "big") + text


def send(fd: int, message: object) -> None:
    """Write one message to a descriptor.

    Args:
        fd: a socket or pipe; blocks while its buffer is full.
        message: what `json.dumps` takes.

    Raises:
        TooLong: it is longer than MOST_BYTES.
        Closed: nobody reads there any more.
    """
    framed = frame(message)
    length = len(framed) - LENGTH
    if length > MOST_BYTES:
        raise TooLong(f"{length} bytes of data, more than {MOST_BYTES}")
    rest = memoryview(framed)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except OSError as error:
            raise Closed from error


def receive(fd: int) -> Wire:
    """Read one message from a descriptor.

    Args:
        fd: a socket or pipe; blocks until a whole message is there.

    Raises:
        Closed: there is none.
        TooLong: it says that it is longer than MOST_BYTES.
        ValueError, RecursionError: it is no JSON.
    """
    length = int.from_bytes(_read(fd, LENGTH), "big")
    if length > MOST_BYTES:
        raise TooLong(f"{length} bytes of data, more than {MOST_BYTES}")
    return json.loads(_read(fd, length))


def _read(fd: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        try:
            part = os.read(fd, min(count, 1 << 20))
        except OSError as error:
            raise Closed from error
        if not part:
            raise Closed
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
