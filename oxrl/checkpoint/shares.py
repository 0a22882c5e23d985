"""A rank's share of a checkpoint: it writes the pieces that it holds to their places, hashed.

No rank gathers anything. All write into the same files, so these have to be on a file system that
every rank sees.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from oxrl.checkpoint.format import Part, write_parts
from oxrl.checkpoint.layout import WEIGHT, Entry, FileLayout, FileLayouts, Key, create_files
from oxrl.errors import EngineError, NonFiniteError
from oxrl.models.stored import non_finite_values
from oxrl.runs.device import is_apart
from oxrl.runs.ranks import Ranks

WRITE_BYTES = 16 * 2**20
FLUSH_BYTES = 256 * 2**20
# How long a rank may take to notice that nobody wants its share any more, in seconds.
DROP_S = 10.0


class PieceOfWeight(NamedTuple):
    """The part of a weight that one rank holds: elements from `start` on, flat, in its memory."""

    name: str
    start: int
    values: Tensor


# With the kind of each.
HeldWeights = Iterator[tuple[str, PieceOfWeight]]


# This rank's, by kind and weight.
Pieces = Mapping[Key, PieceOfWeight]


def copies(files: FileLayouts, pieces: Pieces) -> Pieces:
    """Copy those pieces to the CPU that belong in files, so that training may go on."""
    found: dict[Key, PieceOfWeight] = {}
    for file in files:
        for key, (_, entry) in file.places.items():
            if key in pieces:
                found[key] = _on_cpu(pieces[key], entry.type.dtype)
    return found


def _on_cpu(piece: PieceOfWeight, dtype: torch.dtype) -> PieceOfWeight:
    """A copy of a piece as it is to be stored, in pinned memory where it comes from a GPU."""
    pinned = is_apart(piece.values.device)
    copy = torch.empty_like(piece.values, device="cpu", dtype=dtype, pin_memory=pinned)
    copy.copy_(piece.values)
    return piece._replace(values=copy)


class ShareWriter:
    """Writes this rank's share of a checkpoint, in another thread, which needs no other rank.

    Args:
        ranks: that write together.
        directory: the same one for every rank.
        files: what belongs in it.
        pieces: those of this rank, which nobody changes until they are written.
    """

    def __init__(self, ranks: Ranks, directory: Path, files: FileLayouts, pieces: Pieces) -> None:
        self._ranks = ranks
        self._directory = directory
        self._files = files
        self._pieces = pieces
        self._error: Exception | None = None
        self._parts: dict[str, Part] = {}
        # (what a weight is called in an error, how many values it has) -> how many are no numbers.
        self._not_finite: Counter[tuple[str, int]] = Counter()
        self._dropped = False
        self._thread = Thread(target=self._write, daemon=True)
        self._written = 0  # bytes
        self._flushed = 0  # of these, those that were flushed at least

    def begin(self, prepare: Callable[[], None]) -> bool:
        """Make the files, and begin to write; collective.

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
        except (OSError, SafetensorError):
            self._ranks.agree(False)
            raise
        begun = self._ranks.agree(True)
        if begun:
            self._thread.start()
        return begun

    def progress(self) -> tuple[int, bool]:
        """Bytes that all ranks have written, and whether they are done; collective."""
        said = self._ranks.gather((self._written, not self._thread.is_alive()))
        return sum(count for count, _ in said), all(done for _, done in said)

    def drop(self) -> None:
        """Stop writing: nobody wants it any more."""
        self._dropped = True
        self._thread.join(DROP_S)

    def finish(self) -> None:
        """Wait until all ranks have written, and join it; collective.

        Raises:
            OSError: the disk refused, some rank; on rank 0.
            EngineError: some rank failed, and no disk had a part in it; on every rank.
            NonFiniteError: a value of some rank is NaN or infinite; on every rank.
        """
        self._thread.join()
        own = self._error
        fault = None if own is None or isinstance(own, OSError) else f"{type(own).__name__}: {own}"
        refused = str(own) if isinstance(own, OSError) else None
        found = self._ranks.gather((fault, refused))
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
        shares = self._ranks.gather((self._not_finite, self._parts))
        not_finite = sum((counts for counts, _ in shares), Counter[tuple[str, int]]())
        for (weight, values), wrong in not_finite.items():
            raise NonFiniteError(f"{weight}: {wrong} of {values} values are NaN or infinite")
        if self._ranks.first:
            write_parts(self._directory, [parts for _, parts in shares])

    def _write(self) -> None:
        """Write this rank's pieces to their places, cast to what is stored, hashed on the way."""
        try:
            for file in self._files:
                self._write_into(file)
        except Exception as error:  # noqa: BLE001  (raised by `finish`, in the thread that waits)
            self._error = error
        self._pieces = {}

    def _write_into(self, file: FileLayout) -> None:
        ranges: list[list[int]] = []
        digest = sha256()
        if self._ranks.first:
            ranges.append([0, len(file.header)])
            digest.update(file.header)
        with (self._directory / file.name).open("r+b") as stream:
            for key, (begin, entry) in file.places.items():
                piece = self._pieces.get(key)
                if piece is None or not piece.values.numel():
                    continue
                end = begin + piece.start * entry.type.dtype.itemsize
                if not ranges or ranges[-1][1] != end:
                    ranges.append([end, end])
                for data in self._as_stored(entry, piece.values):
                    self._write_at(stream.fileno(), data, ranges[-1][1])
                    digest.update(data)
                    ranges[-1][1] += data.nbytes
            os.fsync(stream.fileno())
        if ranges:
            self._parts[file.name] = {"sha256": digest.hexdigest(), "ranges": ranges}

    def _as_stored(self, entry: Entry, values: Tensor) -> Iterator[memoryview]:
        """Values in the bytes of the file, a bounded number at once; counts what is no number."""
        of = WEIGHT if entry.kind == WEIGHT else f"AdamW's {entry.kind} of"
        for part in values.split(WRITE_BYTES // entry.type.dtype.itemsize):
            if self._dropped:
                raise OSError(errno.ECANCELED, "the run ended before everything was written")
            stored = part.to(entry.type.dtype).cpu().contiguous()
            wrong = non_finite_values(stored) if entry.finite else 0
            if wrong:
                self._not_finite[f"{of} {entry.name}", entry.type.shape.numel()] += wrong
            yield memoryview(stored.view(torch.uint8).numpy().data)

    def _write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        while data.nbytes:
            count = put(descriptor, data, offset)
            if not count:
                raise OSError(errno.EIO, "the disk takes nothing more")
            data = data[count:]
            offset += count
            self._written += count
        if self._written - self._flushed > FLUSH_BYTES:
            # Bit by bit: all at once, at the end, would look as if nothing happened.
            os.fsync(descriptor)
            self._flushed = self._written


def put(descriptor: int, data: memoryview, offset: int) -> int:
    """Write some of `data`; how many bytes that was."""
    return os.pwrite(descriptor, data, offset)
