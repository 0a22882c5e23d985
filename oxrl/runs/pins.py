"""The notes that a run makes when it begins, besides its configuration.

Of the bytes of its inputs, which later starts compare; and of the values chosen for fields that say
auto, which a run that goes on, and one that is replayed, take over.

inputs.json   field of the config -> {"where", "commit", "files": {name: {"sha256", "bytes",
              "mtime_ns", "inode"}}}; of code what it uses is among the files
data.json     name of a data file -> its sha256, or the hub's commit
code.json     see code.py
choices.json  field of the config -> {"value": what it was taken for, "why": in words}

A large file is hashed once. Later starts look at its size, time and inode, and hash it again only
where one of them is another; then the hash decides.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from oxrl.errors import DataError, RunDirectoryError
from oxrl.runs.files import Json, pretty_json, read_json, require_kind, write_atomically

INPUTS_FILE = "inputs.json"
DATA_FILE = "data.json"
CHOICES_FILE = "choices.json"
CODE_FILE = "code.json"
# By this name, which is no field's, a change of the code of a run is accepted.
CODE = "code"
DIGITS = 12  # of a hash, in messages
# How names of values begin that code uses, beside those of files and functions.
VALUE = "value of "
IDENTITY = re.compile("[0-9a-f]{6,64}")


@dataclass(frozen=True, kw_only=True)
class Input:
    """Something that a run reads, by the field of the config that names it.

    name: the field. where: the file, folder or name on the hub that it stands for here and now.
    files: name in messages -> file. texts: the same of what no file holds. commit: of the hub.
    code: the files are small and hashed at every start, and their place counts: code may read what
        lies beside it.
    """

    name: str
    where: str
    files: Mapping[str, Path] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    code: bool = False


@dataclass(frozen=True)
class InputChange:
    """A change of an input since the run started, in words."""

    name: str
    then: str
    now: str


def pin(given: Input, known: Json | None) -> Json:
    """Describe an input as it is now; hashes of large files are taken over where they still hold.

    Raises:
        DataError: a file of it cannot be read.
    """
    before: Json = {} if known is None or given.code else known["files"]

    def look(name: str) -> Json:
        return _pin_file(given.files[name], before.get(name))

    try:
        with ThreadPoolExecutor() as threads:
            files = dict(zip(given.files, threads.map(look, given.files), strict=True))
    except OSError as error:
        raise DataError(f"{given.name}: {given.where} cannot be read: {error}") from error
    for name, text in given.texts.items():
        data = text.encode("utf-8", "surrogatepass")
        files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    return {"where": given.where, "commit": given.commit, "files": files}


def _pin_file(path: Path, known: Json | None) -> Json:
    now = path.stat()
    seen = {"bytes": now.st_size, "mtime_ns": now.st_mtime_ns, "inode": now.st_ino}
    if known is not None and seen.items() <= known.items():
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"sha256": digest, **seen}


def input_changes(given: Input, then: Json, now: Json) -> Iterator[InputChange]:
    """Yield the differences between an input and what it was."""
    gone = then["files"] and not now["files"]
    if gone or then["commit"] != now["commit"]:
        yield InputChange(given.name, _described(then), f"{_described(now)} (from {os.getcwd()})")
        return
    # A folder that was moved whole, with the run in it, holds the same.
    moved = then["where"] != now["where"] and then.get("from_run") != now.get("from_run")
    if given.code and moved:
        yield InputChange(given.name, then["where"], f"{now['where']} (from {os.getcwd()})")
    for name in {**then["files"], **now["files"]}:
        before = _short(then["files"].get(name))
        after = _short(now["files"].get(name))
        if before != after:
            yield InputChange(given.name, f"{name} {before}", f"{after} in {now['where']}")


def _described(known: Json) -> str:
    if known["commit"] is not None:
        return f"{known['where']} at commit {known['commit']:.{DIGITS}}"
    return f"{known['where']}, {len(known['files']) or 'no'} files"


def _short(known: Json | None) -> str:
    return "not there" if known is None else f"sha256 {known['sha256']:.{DIGITS}}"


def read_noted(run: Path, name: str) -> Json:
    """Read one of these files in the run directory; empty where there is none.

    Raises:
        RunDirectoryError: it is not what was written there.
    """
    path = run / name
    require_kind(path, folder=False)
    if not path.is_file():
        return {}
    found = read_json(path)
    is_entry, otherwise = FORMS[name]
    if found is None or not all(map(is_entry, found.values())):
        raise RunDirectoryError(f"{path} is not the JSON written there: restore it, or {otherwise}")
    return found


def _is_identity(value: object) -> bool:
    """True if it is a SHA-256 or a commit."""
    return isinstance(value, str) and IDENTITY.fullmatch(value) is not None


def _is_pin(value: object) -> bool:
    """True if it has the form of what `pin` returns."""
    match value:
        case {"where": str(), "commit": str() | None, "files": dict() as files}:
            return all(map(_is_hashed, files.values()))
        case _:
            return False


def _is_hashed(file: object) -> bool:
    return isinstance(file, dict) and isinstance(file.get("sha256"), str)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_choice(value: object) -> bool:
    """True if it has the form of a Choice."""
    match value:
        case {"value": int(), "why": str(), **others}:
            return not others
        case _:
            return False


TAKE_AS_NOW = "delete it to take the inputs as they are now"
# File -> whether something is an entry of it, and what to do where one is not.
FORMS = {
    INPUTS_FILE: (_is_pin, TAKE_AS_NOW),
    DATA_FILE: (_is_identity, TAKE_AS_NOW),
    CODE_FILE: (_is_text, "delete it to take the code as it is now"),
    CHOICES_FILE: (
        _is_choice,
        "write into the configuration what each field in it was taken for, and delete it",
    ),
}


def write_noted(run: Path, name: str, pins: Json) -> None:
    """Note pins for later starts; the same ones are not written again."""
    if read_noted(run, name) != pins:
        write_atomically(run / name, pretty_json(pins))


@dataclass(frozen=True)
class Choice:
    """A value that a field got, and why."""

    value: bool | int
    why: str


def noted_choice(run: Path, field: str) -> Choice | None:
    """Read the value that was chosen when the run began; None where nothing was.

    Args:
        run: its directory.
        field: of the config.

    Raises:
        RunDirectoryError: the file is not what was written there.
    """
    found = read_noted(run, CHOICES_FILE).get(field)
    return None if found is None else Choice(found["value"], found["why"])


def note_choice(run: Path, field: str, choice: Choice) -> None:
    """Note what was chosen; replaces what was noted.

    Args:
        run: its directory.
        field: of the config.
        choice: for it.
    """
    known = read_noted(run, CHOICES_FILE)
    write_noted(run, CHOICES_FILE, known | {field: asdict(choice)})
