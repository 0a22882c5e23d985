"""Files that several processes wrote together, and the hash that each made of its own part.

parts.json   file -> [{"sha256", "ranges": [[begin, end], ...]}, ...], a part per process: bytes
             `begin` to `end` of each range, one after the other. All ranges together are the file.

Who resumes looks at some parts each, so that nobody has to read everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

PARTS_FILE = "parts.json"
READ_BYTES = 16 * 2**20

Part = dict[str, Any]
# File in the directory -> the parts of it.
Parts = dict[str, list[Part]]


def joined(shares: Sequence[Mapping[str, Part]]) -> Parts:
    """What processes wrote of each file, as one."""
    found: Parts = {}
    for share in shares:
        for file, part in share.items():
            found.setdefault(file, []).append(part)
    return found


def write_parts(directory: Path, parts: Parts) -> None:
    """Note who wrote what in `directory`."""
    text = json.dumps(parts, separators=(",", ":")) + "\n"
    (directory / PARTS_FILE).write_text(text, encoding="utf-8")


def read_parts(directory: Path) -> Parts:
    """What `write_parts` noted in `directory`; nothing where one process wrote everything."""
    path = directory / PARTS_FILE
    return json.loads(path.read_bytes()) if path.is_file() else {}


def whole_hash(parts: Sequence[Part], size: int) -> str | None:
    """The hash of a file that one process wrote from its first byte to its last."""
    [first, *others] = parts
    return first["sha256"] if not others and first["ranges"] == [[0, size]] else None


def part_problems(directory: Path, *, rank: int = 0, world: int = 1) -> Iterator[str]:
    """What is wrong with the files in `directory` that have parts.

    Args:
        rank: of this process. Of `world` processes each looks at other parts.
    """
    number = 0
    for file, parts in read_parts(directory).items():
        path = directory / file
        ranges = sorted(bounds for part in parts for bounds in part["ranges"])
        ends = [0, *(end for _, end in ranges)]
        whole = all(begin == before for (begin, _), before in zip(ranges, ends, strict=False))
        if not path.is_file() or not whole or ends[-1] != path.stat().st_size:
            yield f"{file} is missing, was cut, or is not what its parts are of"
            continue
        for part in parts:
            own = number % world == rank
            number += 1
            if own and _hash_of(path, part["ranges"]) != part["sha256"]:
                yield f"{file} has the right size but other contents than were written (sha256)"


def _hash_of(path: Path, ranges: Sequence[Sequence[int]]) -> str:
    digest = sha256()
    with path.open("rb") as file:
        for begin, end in ranges:
            file.seek(begin)
            for at in range(begin, end, READ_BYTES):
                digest.update(file.read(min(READ_BYTES, end - at)))
    return digest.hexdigest()
