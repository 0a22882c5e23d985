"""The training ranks of a run: processes that make the same calls in the same order, each with a part of the rows."""

from __future__ import annotations

import os
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
    with naming_lost_ranks(deadline_s):
        dist.init_process_group(backend, timeout=timedelta(seconds=deadline_s))
        try:
            yield Ranks(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()


@contextmanager
def naming_lost_ranks(deadline_s: float) -> Iterator[None]:
    """Turn what torch.distributed says of a silent or dead rank into an error that says what to look at."""
    try:
        yield
    except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors too
        text = str(error)
        where = f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}"
        if "imed out" in text or "imeout" in text:
            raise DeadlineError(
                f"{where} waited run.deadline_s={deadline_s:g} s for another training rank. Look at the other ranks' "
                f"output first; raise run.deadline_s if they were only slow. ({_first_line(text)})"
            ) from error
        if "losed by peer" in text or "reset by peer" in text or "onnection refused" in text:
            raise EngineError(
                f"{where}: another training rank went away. Its own output has the reason; continue with --resume. "
                f"({_first_line(text)})"
            ) from error
        raise


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200]
