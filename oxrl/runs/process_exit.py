"""The end of a process that was killed, which may take a while and may never come.

The kernel ends a killed process when it leaves the call that it is in. One that reads from a file
server which is dead stays in there for as long as that is; nobody waits for it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from time import monotonic, sleep

log = logging.getLogger(__name__)

# How long a killed process is waited for, and between two looks, in seconds.
KILLED_S = 10.0
LOOK_S = 0.01
LEFT = (
    "%s (process %d) was killed and is still there after %g s: it is in a call that the kernel "
    "does not cut short, such as to a disk or file server that hangs. It is left behind"
)


def end_of(process: subprocess.Popen[bytes], what: str) -> int:
    """Return the exit code of a child that was killed; -9 as well where it is still there.

    Args:
        what: it is, for the warning then.
    """
    try:
        return process.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        log.warning(LEFT, what, process.pid, KILLED_S)
        return -signal.SIGKILL


def end_of_pid(pid: int, what: str) -> int:
    """Return the same of a child that `os.fork` made."""
    until = monotonic() + KILLED_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if monotonic() > until:
            log.warning(LEFT, what, pid, KILLED_S)
            return -signal.SIGKILL
        sleep(LOOK_S)
