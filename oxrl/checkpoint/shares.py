"""A rank's share of a checkpoint: it writes the pieces that it holds to their places, hashed.

No rank gathers anything. All write into the same files, so these have to be on a file system that
every rank sees.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from oxrl.checkpoint.layout import WEIGHT, FileLayout, FileLayouts, Key
from oxrl.checkpoint.shard_hashes import Part, joined, write_parts
from oxrl.engines.train.ranks import Ranks
from oxrl.errors import EngineError, NonFiniteError
from oxrl.models.stored import non_finite_values

WRITE_BYTES = 16 * 2**20
FLUSH_BYTES = 256 * 2**20


class PieceOfWeight(NamedTuple):
    """What one rank holds of a weight: its elements from `start` on, flat, in its own memory."""

    name: str
    start: int
    values: Tensor


# With the kind of each.
HeldWeights = Iterator[tuple[str, PieceOfWeight]]


def on_cpu(piece: PieceOfWeight, dtype: torch.dtype) -> PieceOfWeight:
    """A copy of a piece as it is to be stored, in pinned memory where it comes from a GPU."""
    pinned = piece.values.device.type == "cuda"
    copy = torch.empty_like(piece.values, device="cpu", dtype=dtype, pin_memory=pinned)
    copy.copy_(piece.values)
    return piece._replace(values=copy)


def create_files(directory: Path, files: Iterable[FileLayout]) -> None:
    """Make every file in its full length, with its header.

    Raises:
        OSError: the disk refused.
    """
    for file in files:
        with (directory / file.name).open("wb") as stream:
            stream.write(file.header)
            stream.truncate(file.nbytes)


class ShareWriter:
    """What this rank writes of a checkpoint, in three acts; the second needs no other rank.

    Args:
        ranks: that write together.
        directory: the same one for every rank.
        files: what belongs in it.
        pieces: those of this rank, which nobody changes until they are written.
    """

    def __init__(
        self,
        ranks: Ranks,
        directory: Path,
        files: FileLayouts,
        pieces: Mapping[Key, PieceOfWeight],
    ) -> None:
        self._ranks = ranks
        self._directory = directory
        self._files = files
        self._pieces = pieces
        self._refused: Exception | None = None
        self._parts: dict[str, Part] = {}
        self._not_finite: dict[Key, int] = {}
        self._dropped = False
        self.written = 0  # bytes
        self._flushed = 0  # of these, those that were flushed at least

    def begin(self, prepare: Callable[[], None]) -> bool:
        """Make the files; collective.

        Args:
            prepare: called on rank 0 first.

        Returns:
            False where rank 0's disk refused.

        Raises:
            OSError, SafetensorError: it did; on rank 0.
        """
        try:
            if self._ranks.first:
                prepare()
                create_files(self._directory, self._files)
        except (OSError, SafetensorError) as error:
            self._ranks.agree(False)
            raise error
        return self._ranks.agree(True)

    def write(self) -> None:
        """Write this rank's pieces to their places, cast to what is stored, hashed on the way."""
        try:
            for file in self._files:
                self._write_into(file)
        except Exception as error:  # noqa: BLE001  (raised by `finish`, in the thread that waits)
            self._refused = error
        self._pieces = {}

    def drop(self) -> None:
        """Stop writing: nobody wants it any more."""
        self._dropped = True

    def finish(self) -> None:
        """Join what all ranks wrote; collective.

        Raises:
            OSError, SafetensorError: the disk refused, some rank; on rank 0.
            EngineError: some rank failed, and no disk had a part in it; on every rank.
            NonFiniteError: a value of some rank is NaN or infinite; on every rank.
        """
        own = self._refused
        of_disk = isinstance(own, OSError | SafetensorError)
        fault = None if own is None or of_disk else f"{type(own).__name__}: {own}"
        found = self._ranks.gather((fault, str(own) if of_disk else None))
        for rank, (fault, _) in enumerate(found):
            if fault is not None:
                raise EngineError(
                    f"rank {rank} failed while it wrote its share of a checkpoint, which is no "
                    f"fault of the disk: {fault}"
                ) from own
        for rank, (_, refused) in enumerate(found):
            if refused is not None:
                if self._ranks.first:  # a disk is rank 0's to tell of
                    raise own or OSError(errno.EIO, f"rank {rank}: {refused}")
                return
        self._require_finite()
        shares = self._ranks.gather(self._parts)
        if self._ranks.first:
            write_parts(self._directory, joined(shares))

    def _write_into(self, file: FileLayout) -> None:
        share = _Share()
        if self._ranks.first:
            share.add(0, file.header)
        with (self._directory / file.name).open("r+b") as stream:
            for key, (begin, entry) in file.places.items():
                piece = self._pieces.get(key)
                if piece is not None and piece.values.numel():
                    dtype = entry.type.dtype
                    share.begin(begin + piece.start * dtype.itemsize)
                    self._write_piece(share, stream.fileno(), key, piece.values, dtype)
            os.fsync(stream.fileno())
        if share.ranges:
            self._parts[file.name] = share.part()

    def _write_piece(
        self, share: _Share, descriptor: int, key: Key, values: Tensor, dtype: torch.dtype
    ) -> None:
        wrong = 0
        for part in values.split(WRITE_BYTES // dtype.itemsize):
            if self._dropped:
                raise OSError(errno.ECANCELED, "the run ended before everything was written")
            stored = part.to(dtype).cpu().contiguous()
            wrong += non_finite_values(stored)
            share.write(descriptor, memoryview(stored.view(torch.uint8).numpy().data))
            self.written += stored.nbytes
            if self.written - self._flushed > FLUSH_BYTES:
                # Bit by bit: all at once, at the end, would look as if nothing happened.
                os.fsync(descriptor)
                self._flushed = self.written
        if wrong:
            self._not_finite[key] = wrong

    def _require_finite(self) -> None:
        """Raise on every rank where some rank held what is no number."""
        counts = self._ranks.gather(self._not_finite)
        first = next((key for of_rank in counts for key in of_rank), None)
        if first is None:
            return
        kind, name = first
        wrong = sum(of_rank.get(first, 0) for of_rank in counts)
        [entry] = [file.places[first][1] for file in self._files if first in file.places]
        of = "weight" if kind == WEIGHT else f"AdamW's {kind} of"
        raise NonFiniteError(
            f"{of} {name}: {wrong} of {entry.type.shape.numel()} values are NaN or infinite"
        )


class _Share:
    """Ranges of one file, in order, and the hash of them all."""

    def __init__(self) -> None:
        self.ranges: list[list[int]] = []
        self._hash = sha256()

    def begin(self, offset: int) -> None:
        """What follows is at `offset`."""
        if not self.ranges or self.ranges[-1][1] != offset:
            self.ranges.append([offset, offset])

    def add(self, offset: int, data: bytes | memoryview) -> None:
        """Note bytes that are in the file."""
        self.begin(offset)
        self._hash.update(data)
        self.ranges[-1][1] += len(data)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write and note bytes."""
        offset = self.ranges[-1][1]
        self.add(offset, data)
        while data.nbytes:
            count = put(descriptor, data, offset)
            if not count:
                raise OSError(errno.EIO, "the disk takes nothing more")
            data = data[count:]
            offset += count

    def part(self) -> Part:
        return {"sha256": self._hash.hexdigest(), "ranges": self.ranges}


def put(descriptor: int, data: memoryview, offset: int) -> int:
    """Write some of `data`; how many bytes that was."""
    return os.pwrite(descriptor, data, offset)
