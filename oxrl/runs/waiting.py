"""The end of a wait: a signal asks to stop, or nothing has come for too long."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic

from oxrl.errors import DeadlineError, Stopped
from oxrl.runs.deadlines import SAY_S, say_waiting
from oxrl.tables.watch import Deadline

# How long a signal may go unseen while the run waits for something, in seconds.
LOOK_S = 0.2
# Whether the run was asked to stop: anything true.
StopAsked = Callable[[], object]


def never() -> bool:
    """Return False: nobody asks to stop."""
    return False


class Patience:
    """One wait for many answers, which may come to many threads.

    Args:
        stop: whether the run was asked to stop; looked at every LOOK_S seconds or so.
        deadline_s: longest wait for the next answer, in seconds.
    """

    def __init__(self, stop: StopAsked = never, deadline_s: float = inf) -> None:
        self.deadline_s = deadline_s
        self._stop = stop
        self._cancelled = False
        self._answered = monotonic()
        self._said = self._answered

    @property
    def slice_s(self) -> float:
        """The seconds to wait until the next look."""
        left = self._answered + self.deadline_s - monotonic()
        return min(LOOK_S, max(left, 0.0))

    def answered(self) -> None:
        """Note that something came: the wait for the next answer begins."""
        self._answered = monotonic()

    def cancel(self) -> None:
        """Note that nobody wants the answers any more: waits in other threads are to end."""
        self._cancelled = True

    def look(self, what: str) -> None:
        """Return if the wait is to go on.

        Args:
            what: is waited for, and what to do about it.

        Raises:
            Stopped: a signal asked to stop.
            DeadlineError: nothing has come for `deadline_s` seconds.
        """
        if self._cancelled or self._stop():
            raise Stopped
        now = monotonic()
        deadline = Deadline("rollout", self.deadline_s)
        if now - self._answered > self.deadline_s:
            raise DeadlineError(f"waited {deadline} for {what}")
        if now - max(self._answered, self._said) > SAY_S:
            self._said = now
            say_waiting(what.partition(". ")[0], deadline, now - self._answered)
