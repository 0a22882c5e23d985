"""Reading and writing of a run's files: whole or absent, one JSON object per line, by no link.

Others may write in a run's directory. A link in it could lead anywhere, so nothing here follows one
to write or to delete: what stands under a name is looked at, or removed, as a link.

In records a number that is not finite is written as the string "nan", "inf" or "-inf": every line
stays valid JSON, and what happened stays visible (null would hide it, a bare NaN would break other
readers). `float()` reads it back.

metrics.jsonl carries a running hash, by which a change to it is seen. The last field of every line
is

    "system/chain": the first 13 hexadecimal digits, as a number, of the SHA-256 of all bytes of the
                    file before `, "system/chain"` in that line

so an edited line does not fit itself, and a line that was removed, inserted or moved does not fit
the next one. A number of 13 digits is exact in every reader of JSON. A checkpoint notes the same
number of all bytes before it: lines that somebody hashed again do not fit that.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from math import isfinite
from pathlib import Path
from shutil import rmtree
from typing import IO, Any
from weakref import WeakSet

from oxrl.errors import RunDirectoryError

# One line of a file of records, to be written.
Record = Mapping[str, object]
# A JSON object, as it is read or about to be written.
Json = dict[str, Any]
# How a number that is not finite stands in a record.
NOT_FINITE = ("nan", "inf", "-inf")
# Integers from here on are no floating-point number.
LARGEST = 10**308
CHAIN_FIELD = "system/chain"
CHAIN_DIGITS = 13
SEALED = re.compile(rb', "system/chain": (\d{1,16})\}\n')


def fsync(path: Path) -> None:
    """Force a file's contents, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear(path: Path) -> None:
    """Remove whatever stands under a name: a link goes, what it leads to stays."""
    if path.is_dir() and not path.is_symlink():
        rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(directory: Path) -> int:
    """Count the bytes of all files under a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def make_folder(path: Path) -> None:
    """Make a folder inside one that exists, unless it is there already.

    Raises:
        RunDirectoryError: something else stands there, for one a link.
    """
    try:
        path.mkdir()
    except FileExistsError:
        require_kind(path, folder=True)


def open_own(path: Path, mode: str) -> IO[bytes]:
    """Open a file to write it, unbuffered: another process reads what was written so far.

    Args:
        mode: as of `open`, binary.

    Raises:
        RunDirectoryError: it is a link.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, mode, buffering=0, opener=opener)
    except OSError as error:
        if error.errno == errno.ELOOP:
            require_kind(path, folder=False)
        raise


# Held locks, which a forked process has no part in.
_locked: WeakSet[IO[bytes]] = WeakSet()


def lock_file(path: Path, how: int) -> IO[bytes]:
    """Open a file and lock it, until it is closed or the process ends, however it ends.

    By `flock`, which is of the file as it was opened: who opens it anew is somebody else, and drops
    nothing by closing it. Locks of `lockf` are of the process: it gets them twice, and loses them
    with the first of its files that is closed. What is forked inherits the open file, and would
    keep the lock of a run that was killed: it closes it at once. On NFS Linux keeps the lock on the
    server.

    Args:
        how: as of `fcntl.flock`.

    Raises:
        BlockingIOError: somebody else has it, and `how` says not to wait.
        RunDirectoryError: it is a link.
    """
    file = open_own(path, "a+b")
    try:
        _locked.add(file)
        fcntl.flock(file, how)
    except BaseException:
        file.close()
        raise
    return file


def _close_locked() -> None:
    for file in _locked:
        file.close()


os.register_at_fork(after_in_child=_close_locked)


def write_all(file: IO[bytes], data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may take only a part at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def require_kind(path: Path, *, folder: bool) -> None:
    """Refuse what oxRL did not put there: a link, a folder in place of a file, a pipe and so on.

    Args:
        path: in a run directory; may be missing.
        folder: whether it should be one; otherwise a file.

    Raises:
        RunDirectoryError: it is something else; says what and what to do.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    wanted = "a folder" if folder else "a file"
    if stat.S_ISLNK(found.st_mode):
        raise RunDirectoryError(
            f"{path} is a symbolic link to {os.readlink(path)!r}, and a run writes only inside its "
            f"own directory: remove the link, or put {wanted} in its place. To keep a run on "
            "another disk set run.dir to a folder there"
        )
    is_folder = stat.S_ISDIR(found.st_mode)
    is_file = stat.S_ISREG(found.st_mode)
    if not (is_folder if folder else is_file):
        kind = "a folder" if is_folder else "a file"
        if not is_folder and not is_file:
            kind = "neither a file nor a folder"
        raise RunDirectoryError(
            f"{path} is {kind}, where a run keeps {wanted}: it was put there by something else. "
            "Move it away, or choose another directory (run.dir=PATH)"
        )
    if not folder and found.st_nlink > 1:
        raise RunDirectoryError(
            f"{path} has {found.st_nlink} names (hard links), and what is written to one is "
            f"written to all: put a copy in its place, cp {path} {path}.copy && mv {path}.copy "
            f"{path}"
        )


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file: a reader, or a crash at any moment, finds the old one or the new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    clear(temporary)
    try:
        with open_own(temporary, "xb") as file:
            write_all(file, content.encode("utf-8") if isinstance(content, str) else content)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        clear(temporary)
        raise
    fsync(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file; what a crash or a full disk left of the last one goes."""
    with open_own(path, "a+b") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        try:
            write_all(file, line)
        except OSError:
            file.truncate(whole)
            raise


def pretty_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_json(path: Path) -> Json | None:
    """Read the JSON object in a file; None where there is no file, or something else in it."""
    try:
        return json_object(path.read_bytes())
    except OSError:
        return None


def json_safe(value: object) -> Any:
    """Replace every float that JSON cannot hold by its name; tuples become lists.

    Raises:
        TypeError: `value` holds something JSON has no word for; names the type.
    """
    # Most of a record are numbers and strings, and what is a Mapping takes longer to find out.
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]  # pyright: ignore
    given = f"{type(value).__name__}: {value!r:.80}"
    raise TypeError(f"a record holds numbers, strings, lists and mappings, got {given}")


def encode_line(record: Record) -> bytes:
    """Encode one line of UTF-8, keys in the order given."""
    value = json_safe(record)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8, but it has a JSON escape
        return json.dumps(value, allow_nan=False).encode() + b"\n"


def write_records(file: IO[bytes], records: Iterable[Record], chain: Chain | None = None) -> None:
    """Write records to an unbuffered file, one line each.

    Args:
        chain: puts the running hash into each line; None: there is none.
    """
    lines = map(encode_line, records)
    if chain is not None:
        lines = map(chain.seal, lines)
    write_all(file, b"".join(lines))


def read_records(path: Path) -> Iterator[Json]:
    """Yield every complete line of a file, not a last one cut by a crash; none of a missing file.

    Raises:
        RunDirectoryError: a complete line is not a JSON object; names file and byte.
    """
    return (record for record, _ in read_records_from(path, 0))


def read_records_from(path: Path, offset: int) -> Iterator[tuple[Json, int]]:
    """Like `read_records`, from byte `offset` on; each record comes with the offset after it."""
    if not path.exists():
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            record = json_object(line)
            if record is None:
                raise RunDirectoryError(
                    f"{path}, byte {offset}: not a JSON object, but {line[:60]!r}: it is not what "
                    "was written there. Restore it from a copy"
                )
            offset += len(line)
            yield record, offset


def read_numbers(path: Path) -> Iterator[Json]:
    """Yield every complete line of a file of metrics; NaN and infinities stand there as words.

    Raises:
        RunDirectoryError: as `read_records`, or a value is no number, or a line has no step.
    """
    for number, record in enumerate(read_records(path), start=1):
        wrong = [name for name, value in record.items() if not _is_number(value)]
        if wrong or "step" not in record:
            name = wrong[0] if wrong else "step"
            raise RunDirectoryError(
                f"{path}, line {number}: {name} = {record.get(name)!r} is no number: it is not "
                "what was written there. Restore it from a copy"
            )
        yield record


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return value in NOT_FINITE
    if isinstance(value, int):
        return abs(value) < LARGEST
    return isinstance(value, float)


def json_object(line: bytes) -> Json | None:
    """Parse the JSON object on a line; None where there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def line_starts_at(path: Path, offset: int) -> bool:
    """True if `offset` is the start of the file or follows a newline."""
    with path.open("rb") as file:
        file.seek(max(0, offset - 1))
        return offset == 0 or file.read(1) == b"\n"


class Chain:
    """The hash of a file's bytes so far."""

    def __init__(self) -> None:
        self._hash = sha256()

    def value(self) -> int:
        """Return the hash of all bytes so far, as a number."""
        return int(self._hash.hexdigest()[:CHAIN_DIGITS], 16)

    def add(self, data: bytes) -> None:
        """Go on with bytes as they are."""
        self._hash.update(data)

    def seal(self, line: bytes) -> bytes:
        """Go on with a line, a JSON object that is not empty; returned with its field."""
        content = line.removesuffix(b"}\n")
        self.add(content)
        field = b', "%s": %d}\n' % (CHAIN_FIELD.encode(), self.value())
        self.add(field)
        return content + field


def first_break(lines: Iterable[bytes]) -> int | None:
    """Find the first line, from 1, that is not what was written after those before it.

    None where every line is right.
    """
    chain = Chain()
    for number, line in enumerate(lines, start=1):
        if not _fits(chain, line):
            return number
    return None


def _fits(chain: Chain, line: bytes) -> bool:
    """True if a line is right behind what `chain` holds, which then holds it too."""
    found = SEALED.search(line)
    if found is None:
        return False
    chain.add(line[: found.start()])
    right = chain.value() == int(found[1])
    chain.add(line[found.start() :])
    return right and found.end() == len(line)
