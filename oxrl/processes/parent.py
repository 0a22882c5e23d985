"""The end of a process whose parent is gone, whatever it is doing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

# Between two looks whether the parent is there, in seconds.
LOOK_S = 1.0


def leave_with_parent(leave: Callable[[], object]) -> None:
    """From now on, leave once the parent of this process is gone.

    A parent that was killed can say nothing, and a process that waits in a collective, or loads a
    model, reads nothing.

    Args:
        leave: ends this process.
    """
    arguments = (os.getppid(), leave)
    threading.Thread(target=_leave_without, args=arguments, name="parent", daemon=True).start()


def _leave_without(parent: int, leave: Callable[[], object]) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    leave()
