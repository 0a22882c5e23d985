"""The target of a command: a run, a checkpoint of one, or a model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from oxrl.checkpoint.format import is_checkpoint, latest_checkpoint, locked
from oxrl.errors import CheckpointError
from oxrl.modelfiles.files import refuse_missing_folder
from oxrl.runs.directory import is_run, recorded_config

CHECKPOINTS = "checkpoints"


class Target(NamedTuple):
    """A model by name, and the run that it belongs to, if it does to one."""

    model: str
    run: Path | None


def find_target(given: str | Path, pins: ExitStack) -> Target:
    """Find the model that a run, its folder of checkpoints, a checkpoint or a model's name means.

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


def newest_checkpoint(run: Path) -> Path:
    """Find the folder of a run's newest whole checkpoint.

    Raises:
        CheckpointError: it has none.
    """
    checkpoint = latest_checkpoint(run / CHECKPOINTS)
    if checkpoint is None:
        raise CheckpointError(f"{run} has no checkpoint")
    return checkpoint.path


def learned(run: Path) -> Path:
    """Find the folder of the weights that a run is worth going on with.

    Returns:
        Those of its best evaluation, where it keeps them; else its newest whole checkpoint.

    Raises:
        CheckpointError: it has neither.
    """
    best = run / "best"
    return best if best.is_dir() else newest_checkpoint(run)
