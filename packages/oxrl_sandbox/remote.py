"""Programs judged by a service that speaks SandboxFusion's `POST /run_code`.

The service runs one Python program for each job: a relay, which starts the same unit as here in a
process of its own and feeds it what comes on its standard input. So the tests stay out of files and
of the judged process's reach, and the verdict comes between two words that nobody can guess. The
unit filters system calls; everything else is the service's isolation.

Source: https://bytedance.github.io/SandboxFusion/docs/api/run-code-run-code-post, the fields of
request and response.
"""

from __future__ import annotations

import base64
import dataclasses
import http.client
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from oxrl_sandbox import bundle
from oxrl_sandbox.findings import Job, Json, SandboxError, Verdict, finding
from oxrl_sandbox.inside import plain
from oxrl_sandbox.inside.confine import Limits

# Seconds more than the program's limits that the service gets, and then the connection.
MARGIN_S = 10.0
# Reads a word and the messages of a unit as base64; hides its memory, for it holds the tests.
RELAY = """
import base64, ctypes, subprocess, sys, tempfile
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
word, limit, data = sys.stdin.read().split()
command = [sys.executable, *{options!r}, "-c", {boot!r}]
given = {{"input": base64.b64decode(data), "capture_output": True, "timeout": float(limit)}}
with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
        command, cwd=folder, env={{"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"}}, **given
    )
said = [base64.b64encode(text).decode() for text in (done.stdout, done.stderr)]
print(word, *("=" + text for text in said), word)
"""


class RemoteSandbox:
    """A service, used like `Sandbox`; from any number of threads.

    Args:
        url: of the service; `/run_code` is appended where it does not end so.
        limits: of each program.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        self.url = url if url.endswith("/run_code") else f"{url.rstrip('/')}/run_code"
        self.limits = limits

    def start(self) -> None:
        """Have a program judged whose verdict is known.

        Raises:
            SandboxError: the service is not there, or does not judge right.
        """
        job = Job(
            "calls", {"code": "def one(): return 1"}, {"tests": ["assert one() == 1"], "setup": ""}
        )
        found = self.judge(job)
        if found.reason or found.bad:
            raise SandboxError(f"{self.url} judges a right program wrong: {found}")

    def judge(self, job: Job, *, alone: bool = False) -> Verdict:
        """Have a program judged by the service.

        Args:
            job: the program, its tests and how they are run.
            alone: as of `Sandbox.judge`; the service does as it can.

        Returns:
            What the tests found, or why the program failed them.

        Raises:
            SandboxError: nothing is known of the program: nobody answered, or something else.
        """
        config = {
            "level": "basic",
            "limits": dataclasses.asdict(self.limits),
            "landlock": False,
            "room": False,
            "folder": ".",
            "mount_point": "",
            "watch": False,
        }
        header = {"id": 1, "kind": job.kind, "partial": job.partial, "limits": config["limits"]}
        messages = (bundle.sources(), config, header, job.program, job.tests)
        word = secrets.token_hex(16)
        limit_s = self.limits.wall_s + MARGIN_S
        data = base64.b64encode(b"".join(map(plain.frame, messages))).decode()
        request = {
            "language": "python",
            "code": RELAY.format(options=bundle.OPTIONS, boot=bundle.BOOT),
            "stdin": f"{word} {limit_s} {data}",
            "run_timeout": limit_s + MARGIN_S,
            "compile_timeout": limit_s,
        }
        reply = self._post(request, limit_s + 2 * MARGIN_S)
        return self._finding(job, reply, word)

    def _post(self, request: Json, limit_s: float) -> Json:
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        sent = urllib.request.Request(self.url, data=body, headers=headers)
        try:
            with urllib.request.urlopen(sent, timeout=limit_s) as response:
                return json.load(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # a refusal is an open reply
            raise SandboxError(f"{self.url}: {error}") from error

    def _finding(self, job: Job, reply: Json, word: str) -> Verdict:
        """Read the service's reply.

        Raises:
            SandboxError: it says nothing about the program.
        """
        run: Any = reply.get("run_result") or {}
        parts = str(run.get("stdout") or "").partition(word)[2].split()
        if len(parts) != 3 or parts[2] != word:
            said = reply.get("message") or run.get("stderr") or run.get("status")
            raise SandboxError(f"{self.url} did not run the program: {str(said)[-500:]}")
        graded: Json | None = None
        for message in _messages(base64.b64decode(parts[0][1:])):
            if problem := message.get("failed") or message.get("broken"):
                raise SandboxError(f"{self.url}: {problem}")
            graded = message.get("graded", graded)
            if "program" in message:
                return finding(job.kind, self.limits, graded, message)
        trouble = base64.b64decode(parts[1][1:]).decode(errors="replace")
        raise SandboxError(f"{self.url} ended without a verdict: {trouble[-500:]}")


def _messages(said: bytes) -> Iterator[Json]:
    """The whole messages at the start of what a unit said."""
    while said:
        end = plain.LENGTH + int.from_bytes(said[: plain.LENGTH], "big")
        if len(said) < end:
            break
        yield json.loads(said[plain.LENGTH : end])
        said = said[end:]
