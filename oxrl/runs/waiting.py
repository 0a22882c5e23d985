"""Waits of a run, and what ends them: an answer, a signal that asks to stop, a deadline.

The kernel ends a killed process when it leaves the call that it is in. One that reads from a file
server which is dead stays in there for as long as that is; nobody waits for it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from threading import Event, Thread, current_thread, main_thread
from time import monotonic, sleep
from types import FrameType

from oxrl.errors import DeadlineError, Interrupted, Stopped
from oxrl.tables.watch import Deadline

log = logging.getLogger(__name__)

# Seconds between two messages about one wait.
SAY_S = 30.0
# Level of such messages: above what only run.log has, below a warning.
WAITING = 25
logging.addLevelName(WAITING, "WAITING")
# How long a signal may go unseen while the run waits for something, in seconds.
LOOK_S = 0.2
# How long a killed process is waited for, and between two looks at it, in seconds.
KILLED_S = 10.0
KILLED_LOOK_S = 0.01
LEFT = (
    "%s (process %d) was killed and is still there after %g s: it is in a call that the kernel "
    "does not cut short, such as to a disk or file server that hangs. It is left behind"
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Whether the run was asked to stop: anything true.
StopAsked = Callable[[], object]


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


def no_stop() -> bool:
    """Return False: nobody asks to stop."""
    return False


class Patience:
    """One wait for many answers, which may come to many threads.

    Args:
        stop: whether the run was asked to stop; looked at every LOOK_S seconds or so.
        deadline_s: longest wait for the next answer, in seconds.
    """

    def __init__(self, stop: StopAsked = no_stop, deadline_s: float = inf) -> None:
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

    def look(self, what: str) -> float:
        """Return if the wait is to go on: the seconds to wait until the next look.

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
        return self.slice_s


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


def end_of_episode(pid: int) -> int:
    """Return the same of the process of an episode, which `os.fork` made."""
    until = monotonic() + KILLED_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if monotonic() > until:
            log.warning(LEFT, "an episode", pid, KILLED_S)
            return -signal.SIGKILL
        sleep(KILLED_LOOK_S)


class StopRequest:
    """A request to stop: while open, signals that would end the process only note that they came.

    SIGTERM, SIGINT and SIGHUP set `requested` to their name. The run looks at it between pieces of
    work and while it waits, saves and raises `Interrupted`. A second signal ends the process at
    once with the same exit code. A SIGHUP that is ignored, as under nohup, stays ignored. Outside
    the main thread, where Python allows no handlers, nothing is ever requested.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._handlers = ExitStack()
        self._terminals: list[int] = []

    def __bool__(self) -> bool:
        return self.requested is not None

    def __enter__(self) -> StopRequest:
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        if current_thread() is main_thread():
            for number in SIGNALS:
                if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                before = signal.signal(number, self._handle)
                self._handlers.callback(signal.signal, number, before)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handlers.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        again = self.requested is not None
        if number == signal.SIGHUP:
            self._leave_dead_terminals()
        text = f"{name}: stopping after this piece of work and saving; again to exit at once"
        if again:
            text = f"second signal ({name}), exiting at once; the last checkpoint is intact"
        # A handler may run in the middle of any print or log call; only a bare write is safe there.
        with suppress(OSError):
            os.write(2, f"oxrl: {text}\n".encode())
        if again:
            os._exit(Interrupted.exit_code)
        self.requested = name

    def _leave_dead_terminals(self) -> None:
        """Send to nowhere what would be written to a terminal that was closed.

        Every such write fails, and the run still has something to save.
        """
        for fd in self._terminals:
            if not os.isatty(fd):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, fd)
                os.close(null)
