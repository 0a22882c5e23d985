"""A checkpoint written in one go, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from oxrl.checkpoint.writer import CheckpointWriter


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    state: Mapping[str, object],
    offsets: Mapping[str, int],
    keep: int,
) -> Path:
    """Write `root/step_<8 digits>` atomically and remove old ones; see CheckpointWriter.

    Args:
        write: called with an empty directory, writes the engine's files there.
    """
    writer = CheckpointWriter(root, step, state=state, offsets=offsets, keep=keep)
    writer.fill(write)
    writer.complete(lambda: None)
    return root / f"step_{step:08d}"
