"""Seeded nonsense: values, files and folders that no test would think of one by one."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oxrl.errors import OxrlError

# What a field may be given: of another type, at an edge, huge, hostile, or empty.
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    10**9,
    10**30,
    -(10**18),
    0.0,
    1e-300,
    1e300,
    0.5,
    1.5,
    float("nan"),
    float("inf"),
    "",
    " ",
    "x",
    "null",
    "1e-6",
    "/",
    "..",
    "../x",
    "a/b/c",
    "a\x00b",
    "\x1b[31mred",
    "\u202e",
    "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    "x" * 3000,
    "hf://datasets/a/b/c.jsonl",
    "hf://",
    "file.py:function",
    "train.jsonl:x",
    "builtin:",
    "builtin:tiny",
    "math",
    [],
    [1, 2],
    {},
    {"a": 1},
    {"train.jsonl": 0.5},
    {"": -1},
    {"dpo": 1.0},
    {1: None},
)
# What stands in YAML where it should not.
SYNTAX = (
    "\t",
    ":",
    "- ",
    "[",
    "{",
    "&a",
    "*a",
    "!!python/object:x",
    "'",
    '"',
    "#",
    "%",
    "---",
    "\x00",
    "?",
)


def fails(seed: int, work: Callable[[random.Random], object], *codes: int) -> str:
    """Do one case; say what went wrong, if it was anything but an error of ours with these codes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work(random.Random(seed))
    except OxrlError as error:
        if error.exit_code in codes:
            return ""
        return f"seed {seed}: exit code {error.exit_code}: {error}"
    except Exception as error:  # noqa: BLE001 - what must never happen, whatever it is
        return f"seed {seed}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def nested(choose: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = choose.randrange(9 if depth < 3 else 7)
    if kind == 7:
        return [nested(choose, depth + 1) for _ in range(choose.randrange(4))]
    if kind == 8:
        words = ("role", "content", "prompt", "answer", "a", "")
        return {choose.choice(words): nested(choose, depth + 1) for _ in range(choose.randrange(4))}
    plain = [value for value in VALUES if not isinstance(value, list | dict)]
    return choose.choice(plain)


def bytes_changed(choose: random.Random, data: bytes) -> bytes:
    """The bytes of a file, with a piece lost, turned, doubled or put in."""
    if not data:
        return b"\x00"
    at = choose.randrange(len(data))
    length = choose.choice((1, 1, 4, 64, 1000))
    kind = choose.randrange(5)
    if kind == 0:
        return data[:at]
    if kind == 1:
        turned = bytes(byte ^ choose.randrange(1, 256) for byte in data[at : at + length])
        return data[:at] + turned + data[at + length :]
    if kind == 2:
        return data[:at] + data[at + length :]
    if kind == 3:
        return data[:at] + choose.randbytes(length) + data[at:]
    return choose.choice((b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 5000, data * 2))


def json_changed(choose: random.Random, data: bytes) -> bytes:
    """A JSON object with one field gone, or of another value, at any depth."""
    try:
        values = json.loads(data)
    except ValueError:
        return bytes_changed(choose, data)
    here = values
    while isinstance(here, dict) and here:
        key = choose.choice(sorted(here))
        if isinstance(here[key], dict) and here[key] and choose.random() < 0.7:
            here = here[key]
            continue
        if choose.random() < 0.3:
            del here[key]
        else:
            here[key] = nested(choose)
        break
    return json.dumps(values).encode()


def file_changed(choose: random.Random, file: Path) -> None:
    """One file of a folder: gone, empty, a folder, a link, or with other bytes."""
    kind = choose.randrange(10)
    if kind == 0:
        file.unlink()
    elif kind == 1:
        file.unlink()
        file.mkdir()
    elif kind == 2:
        file.unlink()
        file.symlink_to(choose.choice(("/nowhere", ".", "..", "/dev/null")))
    elif kind < 6 and file.suffix == ".json":
        file.write_bytes(json_changed(choose, file.read_bytes()))
    else:
        file.write_bytes(bytes_changed(choose, file.read_bytes()))
