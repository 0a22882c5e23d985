"""The parent's side of one reward worker: a process that can be killed, and a socket to it."""

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
from typing import Any

from oxrl.rewards.serve import encode
from oxrl.runs.patience import LOOK_S, Patience

log = logging.getLogger(__name__)

Json = dict[str, Any]
# Longest line that a worker may send, in bytes, and what each score adds to that.
MOST_REPLY = 1 << 20
MOST_PER_SCORE = 1 << 14
CHUNK = 1 << 16
# How much of what a reward prints is kept, in characters: of a run for the log, of a worker that
# died for the reason.
MOST_PRINTED = 20_000
LAST_PRINTED = 300
# A worker that ended its replies in the middle gets this long to tell by what.
LAST_WORDS_S = 1.0


class LateReply(Exception):
    """The worker did not reply in time."""


class LostWorker(Exception):
    """The worker's socket closed before the reply was whole."""


class SuspectWorker(Exception):
    """The worker sent what is no reply to what it was asked: nothing of it can be believed."""


class Printed:
    """What the rewards of a pool print, written to the log up to MOST_PRINTED characters."""

    def __init__(self) -> None:
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
            log.info("a reward worker printed: %s", kept.rstrip())

    def finish(self) -> None:
        """Say how much was cut."""
        with self._lock:
            cut = self._cut
            self._cut = 0
        if cut:
            log.info("%d characters more that reward workers printed were cut", cut)


class RewardWorker:
    """A process that runs the reward, used by one thread at a time.

    Args:
        printed: gets what the process writes to its standard output and error.
    """

    def __init__(self, printed: Printed) -> None:
        paths = [*sys.path, os.environ.get("PYTHONPATH")]
        search_path = os.pathsep.join(path for path in paths if path)
        self._socket, theirs = socket.socketpair()
        self._output, their_output = os.pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "oxrl.rewards.serve", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search_path},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        os.close(their_output)
        os.set_blocking(self._output, False)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._events = select.POLLIN
        self._poll.register(self._socket, self._events)
        self._poll.register(self._output, select.POLLIN)
        self._printed = printed
        self._last_printed = ""
        self._ended = ""
        self.scored = 0

    @property
    def usable(self) -> bool:
        """Whether it is there and silent, as a worker that was asked nothing has to be."""
        if self._ended:
            return False
        try:
            self._socket.recv(1)  # the end of what it sends, if it has died
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def ask(self, message: Json, limit_s: float, patience: Patience, what: str) -> Json:
        """Send a request and wait for the reply to it.

        Args:
            message: the request, without an id.
            limit_s: seconds for the reply.
            patience: how long anything may be waited for.
            what: is asked, for the message of a deadline.

        Raises:
            LateReply: no reply within `limit_s`.
            LostWorker: the worker closed its socket.
            SuspectWorker: it sent anything but one whole reply to this request.
            Stopped: a signal asked to stop.
            DeadlineError: nothing has come for too long, here and elsewhere.
        """
        id = secrets.token_hex(8)
        most = MOST_REPLY + MOST_PER_SCORE * len(message.get("completions", ()))
        line = self._exchange(encode({"id": id} | message), most, limit_s, patience, what)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or reply.get("id") != id:
            raise SuspectWorker(f"sent what is no reply to its request: {line[:80]!r}")
        return reply

    def ends_by_itself(self, patience_s: float) -> bool:
        """Whether the process ends within `patience_s` seconds."""
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
        # It has its own session, and so its own group; members may outlive their leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self._read_output()
        self._socket.close()
        os.close(self._output)
        self._ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        if self._last_printed.strip():
            self._ended += f"; it printed last: {self._last_printed.strip()}"
        return self._ended

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
            if self._output in ready:
                self._read_output()
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
        if events != self._events:
            self._poll.modify(self._socket, events)
            self._events = events
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

    def _read_output(self) -> None:
        """Take what the process has printed; never waits."""
        try:
            chunk = os.read(self._output, CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            with contextlib.suppress(KeyError):  # told twice
                self._poll.unregister(self._output)
            return
        text = chunk.decode(errors="replace")
        self._printed.add(text)
        self._last_printed = (self._last_printed + text)[-LAST_PRINTED:]
