"""Rows of a JSONL or Parquet file, each with the place it came from, and errors that name that
place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from oxrl.errors import DataError

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One object of a data file. `place` reads "file:line" or "file row N", counted from 1; `start`
    is its byte offset in a JSONL file.
    """

    place: str
    fields: Mapping[str, Any]
    start: int = -1

    def fail(self, problem: str, expected: str) -> NoReturn:
        """Raise a DataError that shows the problem, what a row should look like, and what this one
        holds.
        """
        keys = (
            ", ".join(f"{key} ({type(value).__name__})" for key, value in self.fields.items())
            or "nothing"
        )
        raise DataError(f"{self.place}: {problem}\n  expected: {expected}\n  this row has: {keys}")


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield every row of `path`, whose suffix is .jsonl or .parquet.

    JSONL is split on line feeds only (a trailing carriage return and a byte order mark are dropped,
    blank lines are skipped): other Unicode line separators may stand inside strings.

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


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal: tells whether a dataset changed since a
    checkpoint.
    """
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_uid(*parts: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of `parts` as canonical JSON: the same row,
    the same uid.

    Raises:
        TypeError, ValueError: a part is not JSON.
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _jsonl(path: Path) -> Iterator[Row]:
    offset = 0
    with path.open("rb") as file:  # a binary file iterates over \n only
        for number, line in enumerate(file, start=1):
            where, start, offset = f"{path}:{number}", offset, offset + len(line)
            line = line.removeprefix(_BOM) if number == 1 else line
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where} (byte {start + error.start}): not UTF-8: {error.reason}"
                ) from error
            except json.JSONDecodeError as error:
                cut = (
                    ""
                    if line.endswith(b"\n")
                    else "; the file ends inside this line: it may be truncated"
                )
                at = start + len(line.decode("utf-8")[: error.pos].encode())
                raise DataError(f"{where} (byte {at}): not JSON: {error.msg}{cut}") from error
            except RecursionError as error:
                raise DataError(f"{where} (byte {start}): JSON is nested too deeply") from error
            if not isinstance(fields, dict):
                got = f"{type(fields).__name__}: {line[:80]!r}"
                raise DataError(f"{where} (byte {start}): a line must be a JSON object, got {got}")
            yield Row(where, fields, start)


def row_at(path: Path, start: int) -> Row:
    """The row of a JSONL file that `read_rows` found at byte `start`."""
    with path.open("rb") as file:
        file.seek(start)
        return Row(f"{path} byte {start}", json.loads(file.readline().removeprefix(_BOM)), start)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (fields for batch in file.iter_batches() for fields in batch.to_pylist())
            yield from (
                Row(f"{path} row {number}", fields) for number, fields in enumerate(rows, start=1)
            )
    except (pyarrow.ArrowException, OSError) as error:
        size = path.stat().st_size
        raise DataError(f"{path} ({size} bytes): not a readable Parquet file: {error}") from error
