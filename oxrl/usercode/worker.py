"""A process that runs code of users and can be killed, and a socket to it: the parent's side."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading

from oxrl.runs.waiting import end_of
from oxrl.usercode.channel import CHUNK, Channel

log = logging.getLogger(__name__)

# How much of what such processes print is kept, in characters: of all for the log, of one that died
# for the reason.
MOST_PRINTED = 20_000
LAST_PRINTED = 300
# A worker that ended its replies in the middle gets this long to tell by what.
LAST_WORDS_S = 1.0


class Printed:
    """The output of a pool's processes, written to the log up to MOST_PRINTED characters.

    Args:
        who: prints, in the log: "a reward worker".
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._room = MOST_PRINTED
        self._cut = 0
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """Log `text`, as far as there is room."""
        with self._lock:
            kept = text[: self._room]
            self._room -= len(kept)
            self._cut += len(text) - len(kept)
        if kept.strip():
            log.info("%s printed: %s", self._who, kept.rstrip())

    def finish(self) -> None:
        """Say how much was cut."""
        with self._lock:
            cut = self._cut
            self._cut = 0
        if cut:
            log.info("%d characters more that %s printed were cut", cut, self._who)


class Worker:
    """A process that serves one module, used by one thread at a time; it has a keeper, which ends
    all that it started when it ends, and both when this process is gone.

    Args:
        module: run as `python -m MODULE FD`, FD its end of the socket, by
            `oxrl.usercode.keeper`.
        printed: gets what the process writes to its standard output and error.
        threads: that libraries may compute with there.
    """

    def __init__(self, module: str, printed: Printed, *, threads: int = 1) -> None:
        paths = [*sys.path, os.environ.get("PYTHONPATH")]
        search_path = os.pathsep.join(path for path in paths if path)
        ours, theirs = socket.socketpair()
        self._output, their_output = os.pipe()
        with theirs:
            self.process = subprocess.Popen(
                # -B: of a file that is edited twice in a second, the cache would be read.
                [
                    sys.executable,
                    "-PB",
                    "-m",
                    "oxrl.usercode.keeper",
                    module,
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": search_path},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        os.close(their_output)
        os.set_blocking(self._output, False)
        self.channel = Channel(ours)
        self.drain_by(self.channel)
        self._printed = printed
        self._last_printed = ""
        self._ended = ""
        self.asked = 0

    @property
    def usable(self) -> bool:
        """True if it is there and silent, as a worker that was asked nothing has to be."""
        return not self._ended and self.channel.silent

    def ends_by_itself(self, patience_s: float) -> bool:
        """Wait for the process to end; True if it does within `patience_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        return self.process.returncode is not None

    def end(self, patience_s: float = 0.0) -> str:
        """Kill the worker and every process it started; twice is harmless.

        Args:
            patience_s: how long it may take to end by itself.

        Returns:
            How it ended, in words, and what it printed last.
        """
        if self._ended:
            return self._ended
        self.ends_by_itself(patience_s)
        self.process.terminate()
        code = end_of(self.process, "a worker")
        # A keeper that hangs, or none: it has its own group; members may outlive their leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.read_output()
        self.channel.close()
        os.close(self._output)
        self._ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        if self._last_printed.strip():
            self._ended += f"; it printed last: {self._last_printed.strip()}"
        return self._ended

    def read_output(self) -> bool:
        """Take what the process has printed, and what it started; never waits.

        Returns:
            Whether more may come.
        """
        try:
            chunk = os.read(self._output, CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False  # closed by `end` in another thread
        if not chunk:
            return False
        text = chunk.decode(errors="replace")
        self._printed.add(text)
        self._last_printed = (self._last_printed + text)[-LAST_PRINTED:]
        return True

    def drain_by(self, channel: Channel) -> None:
        """Have what is printed read while another channel waits, too."""
        channel.read_too(self._output, self.read_output)
