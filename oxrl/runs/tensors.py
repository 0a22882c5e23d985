"""Tensors of a run as a safetensors file of its own, which appears whole or not at all."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oxrl.errors import RunDirectoryError
from oxrl.runs.files import clear, fsync, make_folder
from oxrl.types import TensorMap, Tensors

log = logging.getLogger(__name__)


def save_tensors(tensors: TensorMap, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors, and what is to be said of them, to `path`, in place of what is there.

    Raises:
        OSError: the disk refused; nothing of it is left.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    clear(temporary)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, temporary, None if metadata is None else dict(metadata))
        fsync(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        clear(temporary)
        if isinstance(error, SafetensorError):
            # Its own error for a full disk, as for everything else that a disk can do.
            raise OSError(errno.EIO, str(error), str(path)) from error
        raise


def load_tensors(path: Path) -> Tensors:
    """Read what `save_tensors` wrote.

    Raises:
        RunDirectoryError: it is not what was written there.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(
            f"{path} is no file of tensors as it was written: {error}"
        ) from error


def keep_batch(run: Path, step: int, tensors: TensorMap) -> None:
    """Keep the batch of a refused step for inspection: dumps/step_<8 digits>.safetensors.

    Args:
        run: the run directory.
        step: the optimizer step.
        tensors: of its batch.
    """
    path = run / "dumps" / f"step_{step:08d}.safetensors"
    where = f"its batch is in {path}"
    try:
        make_folder(path.parent)
        save_tensors(tensors, path)
    except OSError as error:
        # A full disk: the batch would only have been looked at, the run may go on.
        where = f"its batch could not be written to {path}: {error}"
    log.warning("step %d has NaN or infinite values and is not applied; %s", step, where)
