"""A keeper: a process that runs nobody's code, and ends all that another one has started once that
has ended; and the end of a process whose parent is gone.

Also a program, `python -m oxrl.usercode.keeper MODULE ARGUMENTS`: the module, with a keeper.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from io import TextIOWrapper
from typing import NoReturn, cast

from oxrl.usercode.descendants import adopt_orphans, die_with_parent, end_all

# Between two looks whether the parent is there, in seconds.
LOOK_S = 1.0
WOKEN_BY = (signal.SIGCHLD, signal.SIGTERM)


def leave_keeper() -> None:
    """Go on in a child, in a session of its own, and leave this process behind as its keeper.

    Once the child has ended, or the keeper gets SIGTERM or has lost its own parent, it kills the
    child and all that this has started, and ends as the child did. Without Linux there is no
    keeper.
    """
    if sys.platform != "linux":
        return
    adopt_orphans()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WOKEN_BY)
    child = os.fork()
    if child:
        _keep(child)
    os.setsid()
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _keep(child: int) -> NoReturn:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # who reads there shall see the end of the child
    parent = os.getppid()
    ended = status = 0
    while ended != child and os.getppid() == parent:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if not ended:
            woken = signal.sigtimedwait(WOKEN_BY, LOOK_S)
            if woken and woken.si_signo == signal.SIGTERM:
                break
    if ended != child:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    end_all()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # What is blocked, or makes an exception in Python, does not end this process. Nothing more
        # is unblocked: a SIGTERM that came meanwhile would tell the wrong end.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def leave_with_parent() -> None:
    """From now on, end this process once its parent is gone.

    A parent that was killed can say nothing, and a process that waits in a collective, or loads a
    model, reads nothing.
    """
    parent = os.getppid()

    def leave() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os._exit(1)

    threading.Thread(target=leave, name="parent", daemon=True).start()


if __name__ == "__main__":
    leave_keeper()
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)  # a kill then loses no line
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
