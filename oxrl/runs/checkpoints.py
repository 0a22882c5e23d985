"""Runs and their checkpoints as folders: how they are called, which there are, and which of them is
meant where one is named in place of a model.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oxrl.errors import RunDirectoryError
from oxrl.flat_config import recorded_config
from oxrl.runs.files import clear

CHECKPOINTS = "checkpoints"
# Written last into a checkpoint; it makes a folder one.
MANIFEST_FILE = "manifest.json"
# With `run.exact`: what is promised, and what that depends on; see `oxrl.models.exact_contract`.
CONTRACT_FILE = "exact.json"
NAME = re.compile(r"step_(\d{8,})")


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint directory, healthy or not, oldest first."""
    if not root.is_dir():  # of a name that no folder can have, some Pythons find none, others raise
        return []
    found = [(NAME.fullmatch(path.name), path) for path in root.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def is_checkpoint(folder: Path) -> bool:
    """Tell whether `folder` is a checkpoint, or what a training engine wrote, healthy or not."""
    if (folder / "trainer_state.json").is_file():
        return True
    return (folder / MANIFEST_FILE).is_file() and (folder / "state.json").is_file()


def is_run(folder: Path) -> bool:
    """True if a run was started in `folder`, healthy or not.

    Raises:
        RunDirectoryError: that cannot be seen.
    """
    try:
        started = (folder / "config.yaml").is_file() and (folder / "starts.jsonl").is_file()
    except OSError as error:
        raise RunDirectoryError(f"{folder} cannot be read: {error.strerror}") from error
    saved = list_checkpoints(folder / CHECKPOINTS)
    return started or any(is_checkpoint(path) for _, path in saved)


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


def named_run(given: str | Path) -> Path | None:
    """Find the run that a folder is, or is the folder of checkpoints of; None if it is neither."""
    folder = Path(given)
    if folder.name == CHECKPOINTS and is_run(folder.parent):
        return folder.parent
    if (folder / "config.json").is_file():  # a model, whatever else lies there
        return None
    return folder if (folder / CHECKPOINTS).is_dir() or is_run(folder) else None


def longest_row(model: str | Path, otherwise: int | None) -> int | None:
    """`model.max_length` of the run in whose directory a model lies: a checkpoint, or best/.

    Args:
        model: a folder, a hub name, or `builtin:...`.
        otherwise: for what is in no run directory.

    Returns:
        None: the run reads as much as the model's configuration allows.

    Raises:
        RunDirectoryError: what the run was configured with cannot be read.
    """
    folder = Path(model).absolute()
    for run in folder.parents[:2]:
        # A name on the hub is no folder. Whoever copies a checkpoint need not copy the run.
        if folder.is_dir() and (run / "starts.jsonl").is_file():
            return recorded_config(run).get("model.max_length")
    return otherwise
