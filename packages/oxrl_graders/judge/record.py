"""The record of a judge's replies, by the content of the question: nothing is asked twice.

A line of `judgements.jsonl` is on the disk before anybody sees the verdict in it. So a run that was
killed finds there whatever any of its samples was scored by.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from oxrl.errors import RunDirectoryError
from oxrl.runs.files import Json, encode_line, open_own, read_records_from, require_kind, write_all

FILE = "judgements.jsonl"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A judge's reply.

    Args:
        text: as it came.
        finish_reason: as the server gives it; "length" where it was cut.
        prompt_tokens, completion_tokens: as the server counts them; 0 where it does not.
    """

    text: str
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


# By question, as it is recorded.
Replies = dict[str, Reply]


def content_key(question: Json) -> str:
    """The hash of a question: who is asked what, and how; neither where nor with which key.

    Args:
        question: what is sent, without the address and the key; JSON.

    Returns:
        SHA-256, 64 hexadecimal digits; the order of fields says nothing.
    """
    text = json.dumps(question, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Judgements:
    """Replies by `content_key`, in memory and, where there is a folder for it, in a file.

    Usable from any thread.

    Args:
        path: the file; None: memory alone. It is opened when the first reply is looked for; where
            its folder is not there by then, nothing is written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()

    def find(self, key: str) -> Reply | None:
        """The reply that is recorded; None if there is none.

        Args:
            key: of `content_key`.

        Raises:
            RunDirectoryError: the file is not what was written there.
        """
        with self._lock:
            return self._known.get(key)

    def add(self, key: str, reply: Reply) -> Reply:
        """Record a reply, and return what counts: the first one that was recorded.

        Args:
            key: of `content_key`.
            reply: what the judge said just now.

        Returns:
            The reply to go on with, so that two who asked at once go on alike.

        Raises:
            RunDirectoryError: the file is not what was written there.
            OSError: the disk refused.
        """
        with self._lock:
            if key not in self._known:
                if self._path is not None and self._path.parent.is_dir():
                    with open_own(self._path, "ab") as file:
                        write_all(file, encode_line({"key": key, **asdict(reply)}))
                        os.fsync(file.fileno())
                self._known[key] = reply
            return self._known[key]

    @functools.cached_property
    def _known(self) -> Replies:
        return {} if self._path is None else _read(self._path)


def _read(path: Path) -> Replies:
    """The replies in a file, the first one of each key; what a crash left of the last line goes."""
    require_kind(path, folder=False)
    known: Replies = {}
    whole = 0
    for record, whole in read_records_from(path, 0):
        try:
            key = str(record.pop("key"))
            reply = Reply(**record)
        except (KeyError, TypeError) as error:
            raise RunDirectoryError(
                f"{path}, the line before byte {whole}: not a judgement ({error}). Restore it from "
                "a copy, or remove the line: the judge is then asked again"
            ) from error
        known.setdefault(key, reply)
    if path.exists() and path.stat().st_size > whole:
        with open_own(path, "r+b") as file:
            file.truncate(whole)
    return known
