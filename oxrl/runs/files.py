"""How records are written and read: files that survive a crash, and one JSON object per line.

In records a number that is not finite is written as the string "nan", "inf" or "-inf": every line
stays valid JSON, and what happened stays visible (null would hide it, a bare NaN would break other
readers). `float()` reads it back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# A JSON object, as it is read or about to be written.
Json = dict[str, Any]


def fsync(path: Path) -> None:
    """Force a file's contents, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file: a reader, or a crash at any moment, finds the old one or the new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def pretty_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_json(path: Path) -> Json | None:
    """The JSON object in a file; None where there is no such file, or something else in it."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def json_safe(value: object) -> Any:
    """Replace every float that JSON cannot hold by its name; tuples become lists.

    Raises:
        TypeError: `value` holds something JSON has no word for; names the type.
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]  # pyright: ignore
    given = f"{type(value).__name__}: {value!r:.80}"
    raise TypeError(f"a record holds numbers, strings, lists and mappings, got {given}")


def encode_line(record: Mapping[str, object]) -> bytes:
    """One line of UTF-8, keys in the order given."""
    value = json_safe(record)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8, but it has a JSON escape
        return json.dumps(value, allow_nan=False).encode() + b"\n"


def read_records(path: Path) -> Iterator[Json]:
    """Every complete line of the file; none if it is missing, nor a last one cut by a crash.

    Raises:
        ValueError: a complete line is not a JSON object; names file and byte.
    """
    return (record for record, _ in read_records_from(path, 0))


def read_records_from(path: Path, offset: int) -> Iterator[tuple[Json, int]]:
    """Like `read_records`, from byte `offset` on; each record comes with the offset after it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, byte {offset}: not a JSON object: {error}") from error
            offset += len(line)
            yield record, offset


def line_starts_at(path: Path, offset: int) -> bool:
    """Whether `offset` is the start of the file or follows a newline."""
    with path.open("rb") as file:
        file.seek(max(0, offset - 1))
        return offset == 0 or file.read(1) == b"\n"
