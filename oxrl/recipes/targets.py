"""What a command is pointed at: a run, a checkpoint of one, or a model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from oxrl.errors import CheckpointError
from oxrl.runs.checkpoint import is_checkpoint, latest_checkpoint, locked
from oxrl.runs.directory import is_run

CHECKPOINTS = "checkpoints"


class Target(NamedTuple):
    """A model by name, and the run that it belongs to, if it does to one."""

    model: str
    run: Path | None


def find_target(given: str | Path, pins: ExitStack) -> Target:
    """The model that a run, its folder of checkpoints, a checkpoint or a model's name stands for.

    Args:
        given: a run directory (its newest whole checkpoint is meant), a checkpoint in one, a
            model's folder, a hub name, or `builtin:...`.
        pins: until it is closed, a run that goes on does not remove the checkpoint.

    Raises:
        CheckpointError: the run has no usable checkpoint.
    """
    folder = Path(given)
    if folder.name == CHECKPOINTS and is_run(folder.parent):
        folder = folder.parent
    if (folder / CHECKPOINTS).is_dir() or is_run(folder):
        with locked(folder):  # the newest stays until it is looked at, and pinned
            newest = newest_checkpoint(folder)
            pins.enter_context(locked(newest))
        return Target(str(newest), folder)
    if is_checkpoint(folder) and is_run(folder.absolute().parent.parent):
        pins.enter_context(locked(folder))
        return Target(str(given), folder.absolute().parent.parent)
    return Target(str(given), None)


def newest_checkpoint(run: Path) -> Path:
    """The folder of a run's newest whole checkpoint.

    Raises:
        CheckpointError: it has none.
    """
    checkpoint = latest_checkpoint(run / CHECKPOINTS)
    if checkpoint is None:
        raise CheckpointError(f"{run} has no checkpoint")
    return checkpoint.path
