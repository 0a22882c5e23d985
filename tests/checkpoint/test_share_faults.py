"""Who is told of what, where one rank cannot write its share of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oxrl.checkpoint.shares import ShareWriter
from oxrl.errors import EngineError
from oxrl.runs.ranks import Ranks


@dataclass(frozen=True)
class BesideOne(Ranks):
    """One of two ranks; the other says `said` in every gather."""

    said: Any = None

    def gather(self, value: Any) -> list[Any]:
        return [value, self.said] if self.first else [self.said, value]


def finish(rank: int, tmp_path: Path, own: Exception | None, said: Any) -> None:
    writer = ShareWriter(BesideOne(rank, 2, said=said), tmp_path, [], {})
    writer._error = own
    writer._thread.start()
    writer.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_another_rank_is_not_told_as_one_of_the_disk(rank: int, tmp_path: Path) -> None:
    said = ("MemoryError: no more", None)
    match = rf"rank {1 - rank} failed .* no fault of the disk: MemoryError: no more"
    with pytest.raises(EngineError, match=match):
        finish(rank, tmp_path, None, said)
    with pytest.raises(EngineError, match=f"rank {rank} failed .* RuntimeError: broken"):
        finish(rank, tmp_path, RuntimeError("broken"), (None, None))


def test_a_disk_is_the_first_ranks_to_tell_of(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="rank 1: No space left"):
        finish(0, tmp_path, None, (None, "No space left"))
    finish(1, tmp_path, OSError(28, "No space left"), (None, None))
    with pytest.raises(OSError, match="own disk"):
        finish(0, tmp_path, OSError("own disk"), (None, None))
