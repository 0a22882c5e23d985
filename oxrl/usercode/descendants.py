"""The end of all that a process has started, wherever it went: `setsid` and a second fork leave a
group and a parent, but not the nearest ancestor that has said that it adopts orphans.

The file is sent into the sandbox, too, and imports nothing of oxRL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

SET_PARENT_DEATH = 1
SET_SUBREAPER = 36


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of what descendants leave behind, so that it can be found and killed."""
    ctypes.CDLL(None).prctl(SET_SUBREAPER, 1)


def end_all() -> None:
    """Kill every child of this process, which has one thread, and then what each left to it, until
    there is none.
    """
    # Of the first process of a namespace all others are descendants.
    first = os.getpid() == 1
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            known = "-1" if first else Path("/proc/thread-self/children").read_text()
            for child in known.split():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)
