"""Sampling processes of a test: quick to start, and looked for when they should be gone."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# What the thread of one process would import while another process is forked: its lock would stay
# closed there for good.
import cloudpickle  # noqa: F401


def parent_of(engine: Any) -> list[int]:
    """In the process: its own id, and its parent's, which is its keeper."""
    return [os.getpid(), os.getppid()]


def forked_from_here(command: list[str], **given: Any) -> subprocess.Popen[Any]:
    """What `python -PB -m MODULE …` would be, forked from this process: it has torch already."""

    def serve() -> None:
        """In the child, where it would else become another program."""
        [kept] = given["pass_fds"]
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ |= given["env"]
        _, _, _, module, *sys.argv[1:] = command
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", closefd=False, buffering=1)
        warnings.simplefilter("ignore")  # the module may have been imported here
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        os._exit(0)

    return subprocess.Popen(command, preexec_fn=serve, **given)


FORKING = SimpleNamespace(**vars(subprocess) | {"Popen": forked_from_here})


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))
