"""`oxrl report --live`: the page of runs that go on, made anew whenever it is asked for.

Only programs on this machine can ask, and of these who knows the address: it ends in a key of its
own. The server listens on the loopback address, and answers no request that names another host, as
a page of somebody else's could have a browser send.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from oxrl.errors import OxrlError
from oxrl.report.page import page_parts

ADDRESS = "127.0.0.1"


class LiveServer(ThreadingHTTPServer):
    """Serves the report of some runs.

    Args:
        runs: their directories.
        port: 0: any that is free.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], port: int) -> None:
        self.runs = runs
        try:
            super().__init__((ADDRESS, port), Page)
        except OSError as error:
            raise OxrlError(
                f"cannot listen on {ADDRESS}:{port}: {error.strerror}; choose another --port"
            ) from error
        self.place = f"/{secrets.token_hex(16)}"
        self.url = f"http://{ADDRESS}:{self.server_port}{self.place}"


class Page(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Any
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        """The page, under the key alone."""
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            self.send_error(403, "this address serves programs of this machine")
            return
        if not hmac.compare_digest(self.path.encode(), self.server.place.encode()):
            self.send_error(403, "open the whole address that oxrl report --live printed")
            return
        try:
            body = "".join(page_parts(self.server.runs, live=True)).encode("utf-8")
        except OxrlError as error:
            self.send_error(503, explain=str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not told."""


def serve(runs: Sequence[Path], port: int, told: Callable[[str], None]) -> None:
    """Serve until Ctrl-C.

    Args:
        runs: directories of runs.
        port: 0: any that is free.
        told: is given the address.
    """
    for _ in page_parts(runs):  # whether these are runs is known before the address is told
        break
    with LiveServer(runs, port) as server:
        told(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
