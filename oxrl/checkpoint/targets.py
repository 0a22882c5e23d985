"""The checkpoint that a command is pointed at, by a run, a folder or a model's name."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from oxrl.checkpoint.verify import latest_checkpoint
from oxrl.errors import CheckpointError
from oxrl.modelfiles.folder import refuse_missing_folder
from oxrl.runs.checkpoints import CHECKPOINTS, is_checkpoint, is_run, locked, named_run


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
        DataError: it names a folder here, and there is none.
    """
    run = named_run(given)
    if run is not None:
        with locked(run):  # the newest stays until it is looked at, and pinned
            newest = newest_checkpoint(run)
            pins.enter_context(locked(newest))
        return Target(str(newest), run)
    folder = Path(given).absolute()
    run = folder.parent.parent
    if is_checkpoint(folder) and is_run(run):
        pins.enter_context(locked(folder))
        return Target(str(given), run)
    refuse_missing_folder(str(given), "no such run, checkpoint or folder of a model:")
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


def learned(run: Path) -> Path:
    """The folder of the weights that a run is worth going on with.

    Returns:
        Those of its best evaluation, where it keeps them; else its newest whole checkpoint.

    Raises:
        CheckpointError: it has neither.
    """
    best = run / "best"
    return best if best.is_dir() else newest_checkpoint(run)
