"""Checkpoints: the interface of everything that one holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Saved(Protocol):
    """Something that a checkpoint holds."""

    def save(self, directory: Path) -> None:
        """Write everything that `load` needs; an engine also writes weights for Hugging Face.

        Args:
            directory: made if missing; collective across ranks, rank 0 writes.

        Raises:
            OSError, SafetensorError: the disk refused.
            NonFiniteError: a weight, or what the optimizer holds of it, is NaN or infinite.
        """

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, exactly, whichever engine wrote it and on however many ranks.

        Args:
            directory: where `save` wrote; read by every rank.

        Raises:
            CheckpointError: it does not hold a checkpoint of this model.
        """


class SavedByRanks(Saved, Protocol):
    """Something that ranks write together, each its share, while training goes on or waits."""

    def begin_save(self, directory: Path, copied: bool) -> bool:
        """Begin to save in another thread, which `end_save` waits for; collective.

        Args:
            directory: as of `save`.
            copied: everything is copied to the CPU first, so that training may go on meanwhile.

        Returns:
            Whether it began: not where rank 0's disk refused.

        Raises:
            OSError, SafetensorError: it did; on rank 0.
        """
        ...

    def save_progress(self) -> tuple[int, bool]:
        """Bytes that all ranks have written, and whether they are done; collective."""
        ...

    def end_save(self) -> None:
        """Wait for what `begin_save` began; collective. Raises as `save` does."""

    def drop_save(self) -> None:
        """Stop what `begin_save` began; for this rank alone."""

    def part_problems(self, directory: Path) -> list[str]:
        """List the faults of files that several ranks wrote; each looks at some; collective."""
        ...


# What a checkpoint stores: by the folder in it, "." the checkpoint itself.
SavedEngines = Mapping[str, Saved]
