"""The watch over the head of a Ray cluster, and the last words of a process that Ray ends itself.

Ray waits a minute for a head that is gone and then ends the process without a word of ours; without
the raylet of its machine it ends it at once. A run looks for itself, and ends as runs end.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from contextlib import suppress
from functools import cache
from threading import Event, Thread
from time import monotonic

from oxrl.errors import ConfigError, EngineError

CONNECT_S = 5.0
ADDRESS = re.compile(r"(?:ray://)?\[?(?P<host>[^/]+?)\]?:(?P<port>\d+)")
SETTINGS = b"\x04"  # the kind of an HTTP/2 frame
# How long a head may be gone, as one that Kubernetes starts again is, unless this says otherwise.
GONE_S = 30.0
GONE_SETTING = "RAY_gcs_rpc_server_reconnect_timeout_s"
# After which Ray itself ends a process: later than we do.
RAY_WAITS_S = 7 * 24 * 3600
# Between two looks at the head, in seconds.
LOOK_S = 2.0
RESUME = "What was saved is whole: the same command with --resume goes on from the last checkpoint"
ENDED = (
    "error: the process of this run was ended from outside. It was killed, or Ray ended it because "
    "the raylet of this machine, which every process of a cluster needs, is gone (killed itself, "
    f"or out of memory: `dmesg` tells). {RESUME}"
)
# Says what it is given unless it is sent a line before its input ends.
SAYS_UNLESS_TOLD = 'read -r told || printf "%s\\n" "$0" >&2'


class LostClusterError(EngineError):
    """The head of the Ray cluster is gone, and with it everything that starts or ends actors."""


def host_and_port(address: str) -> tuple[str, int] | None:
    """Split the address of a head; None for auto, and what else Ray has names for."""
    place = ADDRESS.fullmatch(address)
    return None if place is None else (place["host"], int(place["port"]))


def refuse_silence(address: str) -> None:
    """Refuse an address that no head answers at: Ray tries it for minutes, and says little then.

    Raises:
        ConfigError: nobody listens there, or it is no head of a Ray cluster.
    """
    place = host_and_port(address)
    if place is None:
        return
    try:
        with socket.create_connection(place, CONNECT_S) as head:
            if "RAY_USE_TLS" not in os.environ:
                _greet(head)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"run.ray_address: no head of a Ray cluster answers at {address!r} within "
            f"{CONNECT_S:g} s: {error}. `ray status` on the head node tells its address; without "
            "one a run starts a cluster of its own on this machine"
        ) from error


def _greet(head: socket.socket) -> None:
    """Begin to talk as gRPC does, in HTTP/2: both sides send their settings first.

    Raises:
        ConnectionError: something else listens there.
        TimeoutError: whoever listens says nothing.
    """
    nothing_to_set = b"\0\0\0" + SETTINGS + b"\0" * 5
    head.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + nothing_to_set)
    answer = head.recv(9)
    if answer[3:4] != SETTINGS:
        raise ConnectionError(f"something else listens there, which says {answer!r}")


def listens(host: str, port: int) -> bool:
    """True if anybody accepts connections there."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        return False
    return True


@cache
def patience_with_head() -> float:
    """Return the seconds that a head may be gone: what Ray was told to wait, or GONE_S.

    From now on Ray itself waits longer than that.
    """
    told = float(os.environ.get(GONE_SETTING, GONE_S))
    os.environ[GONE_SETTING] = str(RAY_WAITS_S)
    return told


class HeadWatch:
    """Looks at the head of a cluster every LOOK_S seconds.

    Args:
        address: of the head, host:port.
        gone_s: how long it may be gone.
    """

    def __init__(self, address: str, gone_s: float) -> None:
        self._address = address
        self._gone_s = gone_s
        self._seen = monotonic()
        self._over = Event()
        Thread(target=self._look, name="ray head", daemon=True).start()

    def answers(self) -> bool:
        """True if the head answers now."""
        place = host_and_port(self._address)
        return place is None or listens(*place)

    def check(self) -> None:
        """Check that the head was seen not too long ago.

        Raises:
            LostClusterError: it was not.
        """
        gone_s = monotonic() - self._seen
        # Whoever looks may itself have had no processor for as long.
        if gone_s > self._gone_s and not self.answers():
            raise LostClusterError(
                f"the head of the Ray cluster at {self._address} (its GCS process) has not "
                f"answered for {gone_s:.0f} s: it was killed, ran out of memory, or cannot be "
                f"reached. {RESUME}, on a cluster that was started anew"
            )

    def close(self) -> None:
        """Stop looking."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            if self.answers():
                self._seen = monotonic()


class LastWords:
    """A process that says why this one has ended, where this one could not say anything itself."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", SAYS_UNLESS_TOLD, ENDED],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # what ends this process group does not end it
        )

    def close(self) -> None:
        """Stop the process without its saying anything."""
        with suppress(BrokenPipeError):
            self._process.communicate(b"\n", timeout=CONNECT_S)
