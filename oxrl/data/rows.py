"""Records of a JSONL or Parquet file, each with its place, and errors that name that place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from oxrl.errors import DataError

# Whatever JSON can hold, and the object on one line of a file. What is inside is checked where it
# is read, with errors that name the record.
Json = Any
Fields = Mapping[str, Json]
# An object that is being made.
JsonObject = dict[str, Json]
JsonArray = list[Json]
Rows = list[Fields]

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """One object of a data file.

    Args:
        place: "file:line" or "file row N", counted from 1.
        fields: of the row, by name.
        start: its byte offset in a JSONL file.
        raw: the fields as they are in the file, where `fields` are these in our words.
        folder: of the file: relative paths inside a row begin there.
        images: its messages may hold parts of type image, which have been read.
    """

    place: str
    fields: Fields
    start: int = -1
    raw: Fields | None = None
    folder: Path | None = None
    images: bool = False

    def fail(self, problem: str, expected: str) -> NoReturn:
        """Refuse this record.

        Args:
            problem: what is wrong with it.
            expected: what a record should look like.

        Raises:
            DataError: always; shows both, and the fields that the record has.
        """
        fields = self.fields if self.raw is None else self.raw
        described = [f"{key} ({type(value).__name__})" for key, value in fields.items()]
        found = ", ".join(described) or "nothing"
        raise DataError(f"{self.place}: {problem}\n  expected: {expected}\n  this row has: {found}")


def read_rows(path: str | Path) -> Iterator[Record]:
    """Yield every record of a data file, in file order.

    JSONL is split on line feeds only (a trailing carriage return and a byte order mark are dropped,
    blank lines are skipped): other Unicode line separators may stand inside strings.

    Args:
        path: a file that ends in .jsonl or .parquet.

    Returns:
        Records, each with its place; the file is read as they are asked for.

    Raises:
        DataError: no such file, another suffix, or a line or file that cannot be read; names line
            and byte offset.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"no data file {str(path)!r}; `oxrl prepare` writes one from a raw dataset")
    if path.suffix == ".jsonl":
        yield from _jsonl(path)
    elif path.suffix == ".parquet":
        yield from _parquet(path)
    else:
        raise DataError(f"{path}: a data file ends in .jsonl or .parquet, not {path.suffix!r}")


def row_at(path: Path, start: int) -> Record:
    """Read one record of a JSONL file again.

    Args:
        path: of the file.
        start: the byte at which `read_rows` found it.

    Returns:
        A record whose place names the byte instead of the line.

    Raises:
        OSError, ValueError: the file cannot be read, or no JSON begins there.
    """
    with path.open("rb") as file:
        file.seek(start)
        fields = json.loads(file.readline().removeprefix(_BOM))
    return Record(f"{path} byte {start}", fields, start, folder=path.parent)


def file_hash(path: str | Path) -> str:
    """Hash a file's bytes, which tells whether a dataset changed since a checkpoint.

    Args:
        path: of the file; it is read piece by piece.

    Returns:
        SHA-256 in hexadecimal.

    Raises:
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_uid(*parts: Json) -> str:
    """Name a row by what it holds: the same content, the same uid.

    Args:
        parts: JSON values; their order counts, that of keys in a mapping does not.

    Returns:
        The first 16 hexadecimal digits of the SHA-256 of `parts` as canonical JSON.

    Raises:
        TypeError, ValueError: a part is not JSON.
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _jsonl(path: Path) -> Iterator[Record]:
    start = 0
    with path.open("rb") as file:  # a binary file iterates over \n only
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            content = line.removeprefix(_BOM) if number == 1 else line
            if content.strip():
                yield Record(place, _parse(content, place, start), start, folder=path.parent)
            start += len(line)


def _parse(line: bytes, place: str, start: int) -> JsonObject:
    """Parse the JSON object on a line that begins at byte `start` of its file."""
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        at = start + error.start
        raise DataError(f"{place} (byte {at}): not UTF-8: {error.reason}") from error
    except json.JSONDecodeError as error:
        at = start + len(error.doc[: error.pos].encode())
        cut = "; the file ends inside this line: it may be truncated"
        hint = "" if line.endswith(b"\n") else cut
        raise DataError(f"{place} (byte {at}): not JSON: {error.msg}{hint}") from error
    except (RecursionError, ValueError) as error:  # a number may have too many digits
        problem = f"JSON is nested too deeply, or holds what cannot be read: {error}"
        raise DataError(f"{place} (byte {start}): {problem}") from error
    if not isinstance(fields, dict):
        found = f"{type(fields).__name__}: {line[:80]!r}"
        raise DataError(f"{place} (byte {start}): a line must be a JSON object, got {found}")
    return fields


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(f"{path} row {number}", fields, folder=path.parent)
    except (pyarrow.ArrowException, OSError) as error:
        size = path.stat().st_size
        raise DataError(f"{path} ({size} bytes): not a readable Parquet file: {error}") from error
