"""The checkpoints of a run as folders: how they are called, and which there are."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oxrl.runs.files import clear

CHECKPOINTS = "checkpoints"
NAME = re.compile(r"step_(\d{8,})")


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint directory, healthy or not, oldest first."""
    found = [(NAME.fullmatch(path.name), path) for path in root.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def is_checkpoint(folder: Path) -> bool:
    """Tell whether `folder` is a checkpoint, or what a training engine wrote, healthy or not."""
    if (folder / "trainer_state.json").is_file():
        return True
    return (folder / "manifest.json").is_file() and (folder / "state.json").is_file()


def remove_leftovers(root: Path) -> None:
    """Clear what a killed process left half done; only the holder of the run's lock may call it."""
    for path in root.glob(".tmp-*"):
        clear(path)


@contextmanager
def locked(path: Path, how: int = fcntl.LOCK_SH) -> Iterator[None]:
    """Inside, no run that goes on removes the checkpoint at `path`, or any of the run there.

    The kernel lets go of it with the process, however that ends; nothing is written.

    Args:
        path: a checkpoint, or a run directory.
        how: as of `fcntl.flock`; by default for reading, beside others who read.

    Raises:
        BlockingIOError: another process has it, and `how` says not to wait.
        FileNotFoundError: it is not there.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a disk without locks: nobody has one there
        yield
    finally:
        os.close(descriptor)
