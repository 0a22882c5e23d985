"""Stopping on a signal: the first asks, the second does not wait."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

from oxrl.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """A request to stop: while open, signals that would end the process only note that they came.

    SIGTERM, SIGINT and SIGHUP set `requested` to their name. The run looks at it between pieces of
    work and while it waits, saves and raises `Interrupted`. A second signal ends the process at
    once with the same exit code. A SIGHUP that is ignored, as under nohup, stays ignored. Outside
    the main thread, where Python allows no handlers, nothing is ever requested.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._handlers = contextlib.ExitStack()
        self._terminals: list[int] = []

    def __bool__(self) -> bool:
        return self.requested is not None

    def __enter__(self) -> StopRequest:
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        if threading.current_thread() is threading.main_thread():
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
        with contextlib.suppress(OSError):
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
