"""Records of a JSONL or Parquet file, each with its place, and errors that name that place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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


# What every dataset's EXPECTED ends with.
OTHERS = (
    "; also read: ShareGPT (conversations of from, value), Alpaca (instruction, input, output); "
    "columns of other names are named in data.columns, such as {prompt: question}"
)


def in_our_words(record: Record, columns: Mapping[str, str]) -> Record:
    """Return a row under the names that datasets here read.

    Args:
        record: one row, as the file has it; not changed.
        columns: our name -> theirs; "a.b" is the field b inside of a. Theirs is kept beside.

    Returns:
        The record itself where it has our names already, else one like it.

    Raises:
        DataError: a column that `columns` names is not there, nor ours.
    """
    named = dict(record.fields)
    for ours, theirs in columns.items():
        found, value = field_at(record.fields, theirs)
        if found:
            named[ours] = value
        elif ours not in named:
            problem = f"no column {theirs!r}, which data.columns.{ours} names"
            record.fail(problem, f"{theirs!r}, or {ours!r}")
    known = _with_verdict(_with_conversations(_with_instruction(named)))
    if known == record.fields:
        return record
    return replace(record, fields=known, raw=record.fields)


def field_at(fields: Fields, path: str) -> tuple[bool, Json]:
    """Look up a field by its name or path; the first result says if it is there.

    Args:
        fields: of a row.
        path: a name, or names joined by dots; a name with dots in it goes first.

    Returns:
        Whether it is there; its value, which may be None.
    """
    if path in fields:
        return True, fields[path]
    here = fields
    for part in path.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return False, None
        here = here[part]
    return True, here


def _with_instruction(fields: JsonObject) -> JsonObject:
    """Alpaca: the instruction and its input are the prompt, the output is the completion."""
    instruction = fields.get("instruction")
    has_prompt = any(name in fields for name in ("prompt", "messages", "conversations"))
    if not isinstance(instruction, str) or has_prompt:
        return fields
    given = fields.get("input")
    text = f"{instruction}\n\n{given}" if isinstance(given, str) and given else instruction
    prompt = text
    if "system" in fields or "history" in fields:
        turns = _turns(fields.get("history") or [])
        prompt = [*_system(fields), *turns, {"role": "user", "content": text}]
    translated = {**fields, "prompt": prompt}
    if "completion" not in fields and isinstance(fields.get("output"), str):
        translated["completion"] = fields["output"]
    return translated


def _with_conversations(fields: JsonObject) -> JsonObject:
    """ShareGPT: a conversation, or one that ends where two judged replies begin."""
    turns = fields.get("conversations")
    if not isinstance(turns, list) or "messages" in fields or "prompt" in fields:
        return fields
    judged = "chosen" in fields and "rejected" in fields
    name = "prompt" if judged else "messages"
    return {**fields, name: [*_system(fields), *turns]}


def _with_verdict(fields: JsonObject) -> JsonObject:
    """Read a whole conversation with a verdict: it is on the last message."""
    turns = fields.get("messages")
    if not isinstance(turns, list) or len(turns) < 2 or not isinstance(fields.get("label"), bool):
        return fields
    if "prompt" in fields or "completion" in fields:
        return fields
    return {**fields, "prompt": turns[:-1], "completion": turns[-1:]}


def _system(fields: Fields) -> JsonArray:
    text = fields.get("system")
    return [{"role": "system", "content": text}] if isinstance(text, str) and text else []


def _turns(history: JsonArray) -> JsonArray:
    """Read turns of [question, answer] as messages; what is no such turn is left to the caller."""
    messages: JsonArray = []
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2:
            messages.append(turn)
            continue
        messages.append({"role": "user", "content": turn[0]})
        messages.append({"role": "assistant", "content": turn[1]})
    return messages
