"""The parent's side of a socket to a process that can be killed: one request, one reply."""

from __future__ import annotations

import json
import secrets
import select
import socket
import time
from collections.abc import Callable

from oxrl.runs.waiting import LOOK_S, Patience
from oxrl.usercode.messages import Json, encode

# Longest line that a reply may be, in bytes.
MOST_REPLY = 1 << 20
CHUNK = 1 << 16


class LateReply(Exception):
    """The worker did not reply in time."""


class LostWorker(Exception):
    """The worker's socket closed before the reply was whole."""


class SuspectWorker(Exception):
    """The worker sent what is no reply to what it was asked: nothing of it can be believed."""


class Channel:
    """A socket to one process, used by one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._poll = select.poll()
        self._events = select.POLLIN
        self._poll.register(end, self._events)
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
            self._send_with(hand_over, request)
            request = b""
        line = self._exchange(request, most, limit_s, patience, what)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or reply.get("id") != id:
            raise SuspectWorker(f"sent what is no reply to its request: {line[:80]!r}")
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

    def _send_with(self, other: socket.socket, request: bytes) -> None:
        try:
            sent = socket.send_fds(self._socket, [request], [other.fileno()])
        except OSError as error:
            raise LostWorker from error
        if sent < len(request):
            raise LostWorker

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
