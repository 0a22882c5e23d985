"""A reply that failed is closed at once, also where somebody keeps the error."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from oxrl.data.image_files import ImageRules, Unusable, image_bytes
from oxrl_envs import openenv_adapter
from oxrl_graders.judge.endpoint import Client, NoReplyError
from oxrl_sandbox.findings import Job, SandboxError
from oxrl_sandbox.inside.confine import Limits
from oxrl_sandbox.remote import RemoteSandbox


class _Refusal(BaseHTTPRequestHandler):
    """Refuses everything, in a reply that is longer than anybody reads of it."""

    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/").partition("/")[0]))
        self.end_headers()
        self.wfile.write(b"busy" * 100_000)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusal) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def judge_or_teacher(url: str) -> None:
    client = Client(url, retries=0, most_bytes=1000)
    client.ask("/completions", {"model": "m"}, time.monotonic() + 60)


def sandbox(url: str) -> None:
    limits = Limits(cpu_s=2.0, memory_mb=256, disk_mb=8)
    RemoteSandbox(url, limits).judge(Job("case", {"code": "pass"}, {"shown": True}))


def environment(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The library of its socket, which is not opened here.
        patch.setattr(openenv_adapter, "need", lambda module, extra: None)
        openenv_adapter.OpenEnvEnvironment.prepare(url=url)


def image(url: str) -> None:
    image_bytes(f"{url}/a.png", Path(), ImageRules(roots=(url,)))


@pytest.mark.parametrize(
    ("ask", "status", "error"),
    [
        (judge_or_teacher, 200, NoReplyError),
        (judge_or_teacher, 503, NoReplyError),
        (sandbox, 200, SandboxError),
        (sandbox, 503, SandboxError),
        (environment, 200, ValueError),
        (environment, 503, ValueError),
        (image, 404, Unusable),
        (image, 503, Unusable),
    ],
)
def test_a_reply_that_failed_is_closed_also_where_its_error_is_kept(
    site: str, ask: Callable[[str], None], status: int, error: type[Exception]
) -> None:
    # An error keeps the frames that it went through; in a circle they stay until all is collected.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(error) as raised:
            ask(f"{site}/{status}")
        raised.value.__dict__["itself"] = raised.value
        del raised
        gc.collect()
    assert [str(warning.message) for warning in told] == []
