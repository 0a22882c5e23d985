"""The running hash that metrics.jsonl carries, by which a change to it is seen.

The last field of every line is

    "system/chain": the first 13 hexadecimal digits, as a number, of the SHA-256 of all bytes of the
                    file before `, "system/chain"` in that line

so an edited line does not fit itself, and a line that was removed, inserted or moved does not fit
the next one. A number of 13 digits is exact in every reader of JSON. A checkpoint notes the same
number of all bytes before it: lines that somebody hashed again do not fit that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256

FIELD = "system/chain"
DIGITS = 13
SEALED = re.compile(rb', "system/chain": (\d{1,16})\}\n')


class Chain:
    """The hash of a file's bytes so far."""

    def __init__(self) -> None:
        self._hash = sha256()

    def value(self) -> int:
        """Return the hash of all bytes so far, as a number."""
        return int(self._hash.hexdigest()[:DIGITS], 16)

    def add(self, data: bytes) -> None:
        """Go on with bytes as they are."""
        self._hash.update(data)

    def seal(self, line: bytes) -> bytes:
        """Go on with a line, a JSON object that is not empty; returned with its field."""
        content = line.removesuffix(b"}\n")
        self.add(content)
        field = b', "%s": %d}\n' % (FIELD.encode(), self.value())
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
