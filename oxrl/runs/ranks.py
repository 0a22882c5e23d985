"""The training ranks of a run: processes that make the same calls, each with a part of the rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from oxrl.runs.waiting import waiting_for
from oxrl.tables.watch import Deadline

T = TypeVar("T")


class CollectivePatience:
    """The longest wait of this process in collectives."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self._failed = None

    def set(self, deadline: Deadline) -> None:
        """Set the deadline from now on."""
        self.deadline = deadline
        wait = timedelta(seconds=deadline.seconds)
        # Engines make groups of their own beside the one of all ranks.
        for group in list(distributed_c10d._world.pg_map):  # pyright: ignore[reportPrivateUsage]
            distributed_c10d._set_pg_timeout(wait, group)  # pyright: ignore[reportPrivateUsage]

    def failed(self, error: BaseException) -> None:
        """Remember the deadline that held when an error was first seen."""
        if self._failed is None or self._failed[0] is not error:
            self._failed = (error, self.deadline)

    def of(self, error: BaseException) -> Deadline:
        """Return the deadline that an error is about."""
        self.failed(error)
        return self._failed[1] if self._failed else self.deadline


@dataclass(frozen=True)
class Ranks:
    """This process's place among the training ranks; alone unless `joined_ranks` says otherwise."""

    rank: int = 0
    world: int = 1
    _patience: CollectivePatience | None = field(default=None, compare=False, repr=False)

    @contextmanager
    def within(self, deadline: Deadline, what: str) -> Iterator[None]:
        """While open, this rank waits so long for others; every rank opens it.

        Args:
            what: is done, for what rank 0 says meanwhile.
        """
        if self._patience is None:  # alone nobody waits
            yield
            return
        before = self._patience.deadline
        self._patience.set(deadline)
        try:
            with waiting_for(what, deadline) if self.first else nullcontext():
                yield
        except BaseException as error:
            self._patience.failed(error)
            raise
        finally:
            self._patience.set(before)

    @property
    def first(self) -> bool:
        """True on rank 0, which owns the run directory and writes every file."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks of a tensor that has the same shape on each; collective, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Gather the value of every rank, on every rank; collective."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def wait(self, passing: Iterable[dist.Work | None]) -> None:
        """Wait for tensors on their way between two ranks, as long as in a collective.

        Args:
            passing: what `isend` and `irecv` returned.
        """
        for tensor in passing:
            if tensor is None:
                continue
            if self._patience is None:
                tensor.wait()
            else:
                tensor.wait(timedelta(seconds=self._patience.deadline.seconds))

    def any_of(self, value: T | None) -> T | None:
        """Return the value of the first rank that has one, on every rank; collective."""
        return next((found for found in self.gather(value) if found is not None), None)

    def agree(self, value: T) -> T:
        """Rank 0's `value`, on every rank; collective.

        Whatever depends on a file, a signal or a clock goes here.
        """
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


ALONE = Ranks()


def launched_world() -> int:
    """Count the processes that a launcher (torchrun, deepspeed, Ray actors) started; 1 without."""
    return int(os.environ.get("WORLD_SIZE", "1"))
