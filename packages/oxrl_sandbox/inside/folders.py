"""Files of the unit: the folder that judged code writes to, and what it reads as its input."""

from __future__ import annotations

import contextlib
import os
import tempfile

# Folders deeper than this are as bad as too much data: every look at them takes longer.
MOST_DEPTH = 50


def size(folder: str) -> float:
    """Bytes that are written below a folder, infinite where it is too deep or cannot be read.

    Args:
        folder: path; what is in it may change meanwhile.

    Returns:
        Whole blocks, at least 4096 for every entry, so that many empty files count too.
    """
    total = 0
    deepest = folder.count(os.sep) + MOST_DEPTH
    try:
        # By descriptors: no path is too long, and no link that takes a folder's place is followed.
        for path, below, files, place in os.fwalk(folder, onerror=_unless_gone):
            if path.count(os.sep) > deepest:
                return float("inf")
            for name in (*below, *files):
                with contextlib.suppress(FileNotFoundError):
                    state = os.stat(name, dir_fd=place, follow_symlinks=False)
                    total += max(state.st_blocks * 512, 4096)
    except OSError:
        return float("inf")
    return total


def _unless_gone(error: OSError) -> None:
    """Raise what keeps a folder from being read, but that it is there no more."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def empty(folder: str) -> None:
    """Remove everything below a folder, however deep and closed it is.

    What lies deeper is moved up first, so that no path gets long.

    Args:
        folder: path; it stays itself.

    Raises:
        OSError: something cannot be removed.
    """
    number = 0
    os.chmod(folder, 0o700)
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
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode(errors="surrogatepass"))
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
