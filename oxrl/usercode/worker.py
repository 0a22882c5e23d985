"""A process that runs code of users and can be killed, and a socket to it: the parent's side.

One request, one reply.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from oxrl.runs.waiting import LOOK_S, Patience, end_of
from oxrl.usercode.messages import Json, encode

log = logging.getLogger(__name__)

# How much of what such processes print is kept, in characters: of all for the log, of one that died
# for the reason.
MOST_PRINTED = 20_000
LAST_PRINTED = 300
# A worker that ended its replies in the middle gets this long to tell by what.
LAST_WORDS_S = 1.0
# Longest line that a reply may be, in bytes.
MOST_REPLY = 1 << 20
CHUNK = 1 << 16
# Loading may import large libraries, so it gets longer than a call.
START_TIMEOUT_S = 60.0
NOT_LOADED = f"not loaded within {START_TIMEOUT_S:g} s; what does it import?"


class LateReply(Exception):
    """The worker did not reply in time."""


class LostWorker(Exception):
    """The worker's socket closed before the reply was whole."""


class SuspectWorker(Exception):
    """The worker sent what is no reply to what it was asked: nothing of it can be believed."""


class NotLoaded(Exception):
    """A process could not load what it was started for, or did not end; says how."""


class Channel:
    """A socket to one process, used by one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._others: dict[int, Callable[[], bool]] = {}

    @property
    def silent(self) -> bool:
        """True if the other end is there and says nothing, as it has to while nobody asks."""
        try:
            self._socket.recv(1)  # the end of what it sends, if it has died
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def read_too(self, fd: int, read: Callable[[], bool]) -> None:
        """While a reply is waited for, call `read` when `fd` has something, while it says True."""
        self._others[fd] = read
        self._poll.register(fd, select.POLLIN)

    def ask(
        self,
        message: Json,
        limit_s: float,
        patience: Patience,
        what: str,
        *,
        most: int = MOST_REPLY,
        hand_over: socket.socket | None = None,
    ) -> Json:
        """Send a request and wait for the reply to it.

        Args:
            message: the request, without an id.
            limit_s: seconds for the reply.
            patience: how long anything may be waited for.
            what: is asked, for the message of a deadline.
            most: bytes that the reply may have.
            hand_over: a socket that the other end gets a descriptor of, with a short request.

        Raises:
            LateReply: no reply within `limit_s`.
            LostWorker: the other end was closed.
            SuspectWorker: it sent anything but one whole reply to this request.
            Stopped: a signal asked to stop.
            DeadlineError: nothing has come for too long, here and elsewhere.
        """
        id = secrets.token_hex(8)
        request = encode({"id": id} | message)
        if hand_over is not None:
            try:
                sent = socket.send_fds(self._socket, [request], [hand_over.fileno()])
            except OSError as error:
                raise LostWorker from error
            request = request[sent:]
        line = self._exchange(request, most, limit_s, patience, what)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or reply.get("id") != id:
            raise SuspectWorker(f"sent an invalid reply: {line[:80]!r}")
        return reply

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _exchange(
        self, unsent: bytes, most: int, limit_s: float, patience: Patience, what: str
    ) -> bytes:
        """Write all of `unsent`, and read one line and nothing after it."""
        end = time.monotonic() + limit_s
        received = bytearray()
        unsent = self._send(unsent)
        while not received.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0:
                raise LateReply
            ready = dict(self._poll.poll(1000 * min(left, LOOK_S)))
            patience.look(what)
            for fd, read in tuple(self._others.items()):
                if fd in ready and not read():
                    del self._others[fd]
                    self._poll.unregister(fd)
            events = ready.get(self._socket.fileno(), 0)
            if events & select.POLLOUT:
                unsent = self._send(unsent)
            if events & ~select.POLLOUT:
                chunk = self._receive()
                received += chunk
                if b"\n" in chunk[:-1] or len(received) > most:
                    raise SuspectWorker("sent more than the one line that was asked for")
        if unsent:
            raise SuspectWorker("replied before it had read its request")
        return bytes(received)

    def _send(self, unsent: bytes) -> bytes:
        """Write what there is room for; be told of more room if there is more to write."""
        try:
            unsent = unsent[self._socket.send(unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LostWorker from error
        events = select.POLLIN | select.POLLOUT if unsent else select.POLLIN
        self._poll.modify(self._socket, events)
        return unsent

    def _receive(self) -> bytes:
        try:
            chunk = self._socket.recv(CHUNK)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise LostWorker from error
        if not chunk:
            raise LostWorker
        return chunk


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
        search_path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
        ours, theirs = socket.socketpair()
        self.output, their_output = os.pipe()
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
        os.set_blocking(self.output, False)
        self.channel = Channel(ours)
        self.channel.read_too(self.output, self.read_output)
        self._printed = printed
        self._last_printed = ""
        self._ended = ""
        self.asked = 0

    @property
    def usable(self) -> bool:
        """True if it is there and silent, as a worker that was asked nothing has to be."""
        return not self._ended and self.channel.silent

    def load(
        self,
        request: Json,
        limit_s: float,
        patience: Patience,
        what: str,
        *,
        called: str,
        late: str,
    ) -> Json:
        """Have the process load something, and return its reply; see `Channel.ask`.

        Args:
            request: to load it.
            limit_s: seconds for the reply.
            patience: how long anything may be waited for.
            what: is asked, for the message of a deadline.
            called: what the process is called, "its worker".
            late: what is wrong where it does not reply in time.

        Raises:
            NotLoaded: it gave no reply, and is of no use any more.
            Stopped: a signal asked to stop.
            DeadlineError: nothing has come for too long, here and elsewhere.
        """
        try:
            return self.channel.ask(request, limit_s, patience, what)
        except LateReply as error:
            raise NotLoaded(late) from error
        except LostWorker as error:
            how = self.end(LAST_WORDS_S)
            raise NotLoaded(f"{called} ended while loading it ({how})") from error
        except SuspectWorker as error:
            how = self.end(LAST_WORDS_S)
            raise NotLoaded(f"while loading it {called} {error} ({how})") from error

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
        os.close(self.output)
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
            chunk = os.read(self.output, CHUNK)
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
