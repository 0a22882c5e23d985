"""The messages between a process that can be killed and its parent: JSON, every reply with an id.

The side of the process. What the exchange needs is bound to names here before any code of users is
run. Nothing here imports torch: such processes start fast.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Mapping
from typing import Any

from oxrl.tables.columns import NOTHING_MORE, Columns
from oxrl.types import Completion, Entries, Names, Prompt, Segment, TokenRun, Turn

Json = dict[str, Any]
# Above what user code opens, and what it closes by guessing: few programs hold a hundred files.
LOWEST_FD = 100
# Fields that are tuples, and lists in JSON.
PROMPT = ("messages", "token_ids", "images")
SEGMENT = ("token_ids", "logprobs", "versions", "images", "context")
TURN = ("messages",)
COMPLETION = ("segments", "turns", "opening")
write = os.write


def fields_of(value: object) -> Json:
    """The objects of `oxrl.types` as mappings of their fields, entries of columns in base64."""
    if isinstance(value, TokenRun):
        columns = {name: list(map(_as_json, own)) for name, own in value.columns.items()}
        fields = {**vars(value), "columns": columns}
        if not columns:
            del fields["columns"]  # most runs record none, and their files have no word of them
        return fields
    return dict(value) if isinstance(value, Mapping) else vars(value)


def _as_json(entry: Any) -> Any:
    """An entry of a column: the one place where bytes may stand."""
    return b2a_base64(entry, newline=False).decode() if isinstance(entry, bytes) else entry


encode_json = json.JSONEncoder(default=fields_of).encode
decode_json = json.JSONDecoder().decode


def encode(message: Json) -> bytes:
    """One line of JSON."""
    return encode_json(message).encode() + b"\n"


def decode(line: bytes) -> Any:
    """Parse a line of JSON; `ValueError` where it is none."""
    return decode_json(line.decode())


def prompt_of(fields: Json) -> Prompt:
    """A prompt, from its fields as JSON has them."""
    return Prompt(**_with_tuples(fields, PROMPT))  # `answer` may be a list and stay one


def completion_of(fields: Json, columns: Columns = NOTHING_MORE) -> Completion:
    """A completion, from its fields as JSON has them.

    Args:
        fields: of a completion.
        columns: that have to be there of every token that was sampled.

    Raises:
        ValueError: a column is not there, or an entry is none of its column; names all that are
            recorded. Or a text in a column is no base64.
    """
    fields["segments"] = [segment_of(one, columns) for one in fields["segments"]]
    fields["turns"] = [Turn(**_with_tuples(one, TURN)) for one in fields.get("turns", ())]
    return Completion(**_with_tuples(fields, COMPLETION))


def segment_of(fields: Json, columns: Columns) -> Segment:
    """Tokens of one origin, from their fields as JSON has them; see `completion_of`."""
    found = _with_tuples(fields, SEGMENT)
    stored = fields.get("columns", {})
    found["columns"] = {name: _entries(name, entries) for name, entries in stored.items()}
    segment = Segment(**found)
    sampled = segment.token_ids if segment.origin == "policy" else ()
    for name, column in columns.items():
        entries = segment.columns.get(name, ())
        if len(entries) < len(sampled) or not all(map(column.takes, entries)):
            raise ValueError(f"not every token has an entry of {columns}")
    return segment


def _entries(name: str, values: list[Any]) -> Entries:
    """The entries of a column, as JSON has them."""
    try:
        return tuple(
            a2b_base64(value, strict_mode=True) if isinstance(value, str) else value
            for value in values
        )
    except ValueError as error:
        raise ValueError(f"an entry of column {name!r} is no base64 ({error})") from error


def _with_tuples(fields: Json, names: Names) -> Json:
    """The same fields, those of some names tuples where there is something."""
    found = dict(fields)
    for name in names:
        if found.get(name) is not None:
            found[name] = tuple(found[name])
    return found


class Replies:
    """The process's end of the socket, at a descriptor that nothing it starts inherits."""

    def __init__(self, fd: int) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = min(LOWEST_FD, files // 2)
        self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        os.close(fd)
        self.requests = os.fdopen(self._fd, "rb", closefd=False)
        os.register_at_fork(after_in_child=self._close)

    def send(self, message: Json) -> None:
        """Write a whole line."""
        rest = memoryview(encode(message))
        while rest:
            rest = rest[write(self._fd, rest) :]

    def answer_all(self, answer: Callable[[Json], Json]) -> None:
        """Answer one request after the other until nobody asks any more."""
        for line in self.requests:
            request = decode(line)
            self.send({"id": request["id"], **answer(request)})

    def _close(self) -> None:
        # A fork of the user's must not answer for it.
        os.close(self._fd)
