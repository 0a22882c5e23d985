"""The training ranks of a run: processes that make the same calls in the same order, each with a part of the rows."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oxrl.errors import ConfigError, DeadlineError, EngineError

T = TypeVar("T")
# Ranks that were cut off too have answered by then.
ROLL_CALL_S = 5.0


@dataclass(frozen=True)
class Ranks:
    """This process's place among the training ranks; alone unless `joined_ranks` says otherwise."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Rank 0 owns the run directory and writes every file."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of a tensor that has the same shape on each; collective, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, value: T) -> T:
        """Rank 0's `value`, on every rank; collective. Whatever depends on a file, a signal or a clock goes here."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


ALONE = Ranks()


def launched_world() -> int:
    """How many processes the launcher (torchrun, deepspeed, a Ray actor group) says there are; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined_ranks(device: torch.device, *, deadline_s: float) -> Iterator[Ranks]:
    """Join the process group that the launcher's environment describes, and leave it at the end.

    Args:
        device: cuda ranks take the device of LOCAL_RANK and talk over NCCL; CPU tensors always travel over gloo.
        deadline_s: longest wait for the others, when joining and in each collective.

    Raises:
        DeadlineError: the others did not come, or one stopped answering.
        EngineError: a rank went away.
        ConfigError: the launcher's environment is incomplete.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"a distributed train.backend needs a launcher that sets {', '.join(missing)}; start the run with "
            "torchrun --nproc-per-node N"
        )
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    wait, store = timedelta(seconds=deadline_s), None
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=wait))
        store.set_timeout(wait)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
        try:
            yield Ranks(rank, world)
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors too
        text, where = str(error), f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
        if "imed out" in text or "imeout" in text:
            raise DeadlineError(
                f"{where} waited run.deadline_s={deadline_s:g} s for {_silent_ranks(store)}. Look at its output first; "
                f"raise run.deadline_s if it was only slow, or continue with --resume. ({_first_line(text)})"
            ) from error
        if "losed by peer" in text or "reset by peer" in text or "onnection refused" in text:
            raise EngineError(
                f"{where}: {_silent_ranks(store)} went away. Its own output has the reason; continue with --resume. "
                f"({_first_line(text)})"
            ) from error
        raise


def _silent_ranks(store: dist.Store | None) -> str:
    """Who does not answer the roll call that every rank holds when it is cut off: the ranks that died or hang."""
    own, silent = int(os.environ["RANK"]), set(range(int(os.environ["WORLD_SIZE"])))

    def call() -> None:
        # Losing the store says nothing more: whoever answered until then is alive.
        with contextlib.suppress(RuntimeError):
            while store is not None and silent:
                store.set(f"oxrl/cut_off/{own}", "")
                silent.difference_update([rank for rank in silent if store.check([f"oxrl/cut_off/{rank}"])])
                time.sleep(0.1)

    # In a thread: no answer ever comes from a store whose process is stopped.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(ROLL_CALL_S)
    names = ", ".join(map(str, sorted(silent - {own})))
    return f"rank {names}" if names else "another training rank"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200]
