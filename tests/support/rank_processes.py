"""Training ranks as processes, forked from a server that has everything imported: a rank starts in
no time.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.command_line import forked


def start_ranks(
    world: int,
    log: Path,
    target: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
) -> list[BaseProcess]:
    """`world` processes that call `target(*arguments)`, as a launcher starts them; `log`.<rank>
    gets their output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
    }
    ranks: list[BaseProcess] = []
    for rank in range(world):
        own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (environment or {})
        ranks.append(forked(_rank, own, f"{log}.{rank}", target, arguments))
        ranks[-1].start()
    return ranks


def _rank(
    environment: Mapping[str, str], log: str, target: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    with open(log, "wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.environ |= environment
    torch.set_num_threads(1)
    target(*arguments)


def exit_codes(ranks: list[BaseProcess], *, timeout_s: float = 200) -> list[int | None]:
    """How each of them ended; those that do not end in time are killed."""
    deadline = time.monotonic() + timeout_s
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    return codes


def run_ranks(world: int, target: Callable[..., Any], *arguments: Any) -> None:
    """Run `target(*arguments)` on `world` ranks, to the end."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "rank"
        codes = exit_codes(start_ranks(world, log, target, *arguments))
        assert codes == [0] * world, "\n".join(
            path.read_text()[-3000:] for path in sorted(log.parent.iterdir())
        )
