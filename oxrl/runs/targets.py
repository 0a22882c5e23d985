"""Runs that are named where a model is: by their directory, or their folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

from oxrl.flat_config import recorded_config
from oxrl.runs.checkpoints import CHECKPOINTS
from oxrl.runs.directory import is_run


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
