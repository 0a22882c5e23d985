"""Numbers that a model which stays as it is says of rows: computed once per run, and kept."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from oxrl.errors import OxrlError
from oxrl.runs.files import make_folder
from oxrl.runs.ranks import ALONE, Ranks
from oxrl.runs.recorder import save_tensors
from oxrl.types import TensorMap, Tensors

log = logging.getLogger(__name__)


class RowCache:
    """Numbers of rows in files, pieces, each of which is found by all that it was computed from.

    A run that is killed meanwhile goes on behind the last piece. A piece that is not what was
    written is computed again.

    Args:
        folder: of the pieces, in the run directory; it is there as soon as the first piece is.
        about: what the numbers depend on beside the rows: the model's weights, and what is asked.
        ranks: of the run; the first one reads and writes.
    """

    def __init__(self, folder: Path, about: str, ranks: Ranks = ALONE) -> None:
        self._folder = folder
        self._about = about
        self._ranks = ranks

    def piece(
        self, rows: Iterable[bytes], count: int, compute: Callable[[], Tensors]
    ) -> tuple[Tensors, bool]:
        """Find what is kept of rows, or compute and keep it.

        Args:
            rows: all that the numbers depend on, in order; see `row_bytes`.
            count: first dimension of every tensor.
            compute: makes them, by name.

        Returns:
            The tensors, and whether they were computed now.

        Raises:
            OxrlError: they cannot be written.
        """
        key = hashlib.sha256(self._about.encode())
        for part in rows:
            key.update(part)
        path = self._folder / f"{key.hexdigest()[:16]}.safetensors"
        kept = self._ranks.agree(read_piece(path, count) if self._ranks.first else None)
        if kept is not None:
            return kept, False
        made = compute()
        if self._ranks.first:
            write_piece(path, made)
        return made, True


def row_bytes(token_ids: Sequence[int], trained: Sequence[bool], images: Sequence[str]) -> bytes:
    """All of a row that a model reads, as bytes.

    Args:
        token_ids, trained: T each; `trained` says which tokens are asked about.
        images: names of those in it.
    """
    numbers = [len(token_ids), *token_ids, *trained]
    return np.array(numbers, dtype=np.int64).tobytes() + "".join(images).encode()


def write_piece(path: Path, tensors: Tensors) -> None:
    """Write a piece with a hash of what it holds, whole or not at all.

    Raises:
        OxrlError: the disk refuses, or the folder is a link that leads elsewhere.
    """
    try:
        make_folder(path.parent)
        save_tensors(tensors, path, {"sha256": _hash(tensors)})
    except OSError as error:
        raise OxrlError(
            f"{path} cannot be written: {error}. Free space on that disk, or give the run another "
            f"directory; --resume goes on behind the last piece in {path.parent.name}/"
        ) from error


def read_piece(path: Path, count: int) -> Tensors | None:
    """Read a piece; None where there is none, or it is damaged, which is warned of.

    Args:
        path: of its file.
        count: first dimension of every tensor in it.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            written = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError) as error:
        log.warning("%s is damaged and computed again: %s", path, error)
        return None
    sizes = {len(tensor) if tensor.ndim else -1 for tensor in tensors.values()}
    if sizes != {count} or _hash(tensors) != written:
        log.warning("%s is damaged and computed again: it is not what was written there", path)
        return None
    return tensors


def _hash(tensors: TensorMap) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()
