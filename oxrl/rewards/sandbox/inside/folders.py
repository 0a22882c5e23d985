"""Files of the unit: the folder that judged code writes to, and what it reads as its input."""

from __future__ import annotations

import os
import tempfile

# Folders deeper than this are as bad as too much data: every look at them takes longer.
MOST_DEPTH = 50


def size(folder: str) -> float:
    """Bytes that are written below a folder, infinite where it is too deep.

    Folders that cannot be read count nothing.

    Args:
        folder: path; what is in it may change meanwhile.

    Returns:
        Whole blocks, at least 4096 for every entry, so that many empty files count too.
    """
    total = 0
    waiting = [(folder, 0)]
    while waiting:
        path, depth = waiting.pop()
        if depth > MOST_DEPTH:
            return float("inf")
        try:
            entries = list(os.scandir(path))
            states = [entry.stat(follow_symlinks=False) for entry in entries]
        except OSError:
            continue
        for entry, state in zip(entries, states, strict=True):
            total += max(state.st_blocks * 512, 4096)
            if entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, depth + 1))
    return total


def empty(folder: str) -> None:
    """Remove everything below a folder, however deep it is.

    What lies deeper is moved up first, so that no path gets long.

    Args:
        folder: path; it stays itself.

    Raises:
        OSError: something cannot be removed.
    """
    number = 0
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for below in list(os.scandir(entry.path)):
                if below.is_dir(follow_symlinks=False):
                    os.chmod(below.path, 0o700)
                number += 1
                os.rename(below.path, os.path.join(folder, f".{number}.{os.getpid()}"))
            os.rmdir(entry.path)


def held_text(text: str) -> int:
    """A descriptor that a text can be read from, once and by whoever has it.

    Args:
        text: any length; nothing of it is on a disk where the kernel holds files in memory.

    Returns:
        The descriptor, at the beginning of the text; to be closed by the caller.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("input")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    rest = memoryview(text.encode(errors="surrogatepass"))
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def address_space() -> int:
    """Bytes of address space that this process has; a guess where nobody tells."""
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return 256 << 20
    return pages * os.sysconf("SC_PAGE_SIZE")
