"""The messages of a run while it waits for something."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

from oxrl.tables.watch import Deadline

log = logging.getLogger(__name__)

# Seconds between two messages about one wait.
SAY_S = 30.0
# Level of such messages: above what only run.log has, below a warning.
WAITING = 25
logging.addLevelName(WAITING, "WAITING")


@contextmanager
def waiting_for(what: str, deadline: Deadline) -> Iterator[None]:
    """Say every SAY_S seconds, while open, that `what` is still waited for, and how long yet."""
    over = Event()
    begun = monotonic()

    def say() -> None:
        while not over.wait(SAY_S):
            say_waiting(what, deadline, monotonic() - begun)

    Thread(target=say, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def say_waiting(what: str, deadline: Deadline, waited_s: float) -> None:
    """Say that something is still waited for."""
    log.log(WAITING, "%s: waiting for %s, %.0f s of %s", deadline.phase, what, waited_s, deadline)
