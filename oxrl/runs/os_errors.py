"""Refusals of the machine, told as an error of ours: a full disk, no memory and the like.

Such an error can come from any line. Where one leaves a run or a command it is told in words, with
what is safe and what to do. Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from oxrl.errors import DataError, MachineError, OxrlError

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
FILES = (errno.EMFILE, errno.ENFILE)
MEMORY = (errno.ENOMEM, errno.EAGAIN)
# What libraries say in errors of their own kinds. torch, on the CPU and on a GPU; the loader of a
# shared library; a thread or a process that the system has no room for; safetensors.
NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "failed to map segment",
    "bad_alloc",
    "can't start new thread",
)
NO_SPACE = ("no space left", "disk quota exceeded", "file too large", "read-only file system")
RESUME = "What was saved is whole: the same command with --resume goes on from the last checkpoint"


@contextmanager
def explained() -> Iterator[None]:
    """Turn what the machine or a file on the disk refuses into an error of ours, inside the block.

    Raises:
        MachineError, DataError: that happened.
    """
    try:
        yield
    except OxrlError:
        raise
    except Exception as error:
        fault = fault_of(error)
        if fault is None and isinstance(error, OSError) and error.filename is not None:
            # An answer of a server has no words of the system, but some of its own.
            fault = DataError(f"{error.filename}: {error.strerror or error}")
        if fault is None:
            raise
        raise fault from error


def fault_of(error: BaseException) -> MachineError | None:
    """Translate an error that the machine is the cause of into words; None for any other."""
    text = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    said = str(error).lower()
    if isinstance(error, MemoryError) or number in MEMORY or any(map(said.__contains__, NO_MEMORY)):
        return MachineError(
            f"memory ran out ({text}). {RESUME}. To need less: a smaller train.micro_batch_tokens, "
            "model.gradient_checkpointing: true, fewer data.prompts_per_step or "
            "rollout.n_samples, fewer reward.workers, or a smaller model; `oxrl plan` estimates it"
        )
    if number in FILES:
        return MachineError(
            f"too many files are open ({text}). {RESUME}. Raise the limit (ulimit -n), or lower "
            "reward.workers"
        )
    if number in DISK or any(map(said.__contains__, NO_SPACE)):
        return MachineError(
            f"the disk refused ({text}). {RESUME}. Free space there, or write elsewhere; `oxrl "
            "plan` estimates what a run needs"
        )
    return None
