"""Joining the other training ranks, and telling which of them went away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from time import monotonic, sleep

import torch
import torch.distributed as dist

from oxrl.errors import ConfigError, DeadlineError, EngineError, OxrlError
from oxrl.runs.ranks import CollectivePatience, Ranks
from oxrl.tables.watch import Deadline, Deadlines

# Seconds between signs of life of a rank, and without one until it counts as lost.
BEAT_S = 1.0
SILENT_S = 5.0
# What torch.distributed says of a rank that is late, and of one that is gone.
WAITED = ("imed out", "imeout")
CUT_OFF = ("losed by peer", "reset by peer", "onnection refused")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def joined_ranks(device: torch.device, deadlines: Deadlines) -> Iterator[Ranks]:
    """Join the process group that the launcher's environment describes, and leave it at the end.

    Args:
        device: cuda ranks take the device of LOCAL_RANK and talk over NCCL; CPU tensors always
            travel over gloo.
        deadlines: longest waits for the others: `load` when joining; in each collective `step`, but
            inside of `Ranks.within`.

    Raises:
        DeadlineError: the others did not come, or one stopped answering.
        EngineError: a rank went away.
        ConfigError: the launcher's environment is incomplete.
    """
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"a distributed train.backend needs a launcher that sets {', '.join(missing)}; start "
            "the run with torchrun --nproc-per-node N"
        )
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    patience = CollectivePatience(deadlines.of("load"))
    wait = timedelta(seconds=patience.deadline.seconds)
    heartbeat: _Heartbeat | None = None
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=wait))
        store.set_timeout(wait)
        heartbeat = _Heartbeat(store, rank, world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
        patience.set(deadlines.of("step"))
        try:
            yield Ranks(rank, world, patience)
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors too
        explained = _explained(error, heartbeat, patience.of(error))
        if explained is None:
            raise
        raise explained from error
    finally:
        if heartbeat is not None:
            heartbeat.stop()


def _explained(
    error: RuntimeError, heartbeat: _Heartbeat | None, deadline: Deadline
) -> OxrlError | None:
    """Translate an error of torch.distributed; None if it is not about the other ranks."""
    text = str(error)
    waited = any(words in text for words in WAITED)
    cut_off = any(words in text for words in CUT_OFF)
    if isinstance(error, OxrlError) or not (waited or cut_off):
        return None
    where = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    lost = "another training rank" if heartbeat is None else heartbeat.lost()
    first_line = text.strip().splitlines()[0][:200]
    if waited:
        return DeadlineError(
            f"{where} waited {deadline} for {lost}. Look at its output first; "
            f"raise {deadline.field} if it was only slow, or continue with --resume. "
            f"({first_line})"
        )
    return EngineError(
        f"{where}: {lost} went away. Its own output has the reason; continue with --resume. "
        f"({first_line})"
    )


class _Heartbeat:
    """Signs of life of the ranks: in a store each counts up, and watches the other counts."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self._store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (not in its stub)
        self._rank = rank
        now = monotonic()
        self._counts = [-1] * world
        self._changed_at = [now] * world
        self._read_at = now
        self._stop = Event()
        self._store_gone = False
        Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        # RuntimeError: the store went away, with the process that held it.
        with suppress(RuntimeError):
            while not self._stop.wait(BEAT_S):
                for rank, seen in enumerate(self._counts):
                    own = int(rank == self._rank)
                    count = self._store.add(f"oxrl/heartbeat/{rank}", own)
                    if count != seen:
                        self._counts[rank] = count
                        self._changed_at[rank] = monotonic()
                self._read_at = monotonic()
        self._store_gone = not self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def lost(self) -> str:
        """Name the first that fell silent: those that were cut off by it stop a moment later."""
        deadline = monotonic() + SILENT_S + 2 * BEAT_S
        while (silent := self._read_at - min(self._changed_at)) <= SILENT_S:
            # Rank 0, which holds the store, is gone too: because it was cut off, or it is what cut
            # us off.
            if self._store_gone or monotonic() - self._read_at > SILENT_S:
                if silent > 2 * BEAT_S:
                    break
                return "rank 0, where all meet,"
            if monotonic() > deadline:
                return "another training rank"
            sleep(BEAT_S / 10)
        first = min(self._changed_at) + BEAT_S
        silent_ranks = [rank for rank, at in enumerate(self._changed_at) if at < first]
        return "rank " + ", ".join(str(rank) for rank in silent_ranks)
