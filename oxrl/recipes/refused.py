"""What is kept and said of optimizer steps that are refused. Imported when the first one is."""

from __future__ import annotations

import logging
from pathlib import Path

from oxrl.errors import NonFiniteError
from oxrl.runs.files import make_folder
from oxrl.runs.tensors import save_tensors
from oxrl.types import TensorMap

log = logging.getLogger(__name__)


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


def too_many_in_a_row(run: Path, skipped: int, most: int, *, empty: bool) -> NonFiniteError:
    """The error of a run whose steps are refused one after the other.

    Args:
        run: the run directory.
        skipped: how many were.
        most: how many may be.
        empty: the last one had no token to train on.
    """
    why = (
        f"NaN or infinite values, batches in {run / 'dumps'}. Lower train.lr or train.max_grad_norm"
    )
    if empty:
        why = (
            "no token to train on (data/empty_steps). Look at the data and at the rewards "
            "that failed"
        )
    return NonFiniteError(
        f"{skipped} optimizer steps in a row were refused, more than "
        f"train.max_skipped_steps={most}: {why}"
    )
