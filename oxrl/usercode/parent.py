"""The end of a process whose parent is gone, whatever it is doing."""

from __future__ import annotations

import os
import threading
import time

# Between two looks whether the parent is there, in seconds.
LOOK_S = 1.0


def leave_with_parent() -> None:
    """From now on, end this process once its parent is gone.

    A parent that was killed can say nothing, and a process that waits in a collective, or loads a
    model, reads nothing.
    """
    parent = os.getppid()
    threading.Thread(target=_leave_without, args=[parent], name="parent", daemon=True).start()


def _leave_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)
