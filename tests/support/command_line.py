"""`oxrl …` in a process of its own, without waiting for its imports each time.

Importing torch and transformers takes longer than most commands that tests give. One server per
test process imports them once and forks: each command still has a process of its own, with its own
streams, folder, environment and exit code, and can be killed. What a command imports, and how long
it takes to start, is tested in tests/test_cli.py with fresh interpreters.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["warm_start"])


def forked(target: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """A process that will call `target(*arguments)`, forked from the only server of a test process:
    ranks and runs that are going to be killed are forked from it too.
    """
    # Python 3.11 does not tell the server where this process looks for modules.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OXRL_TEST_PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        ensure_running()
    return WARM.Process(target=target, args=arguments)


def _serve(script: str, words: list[str], folder: str, said: str) -> None:
    """What the process does: take the place that a shell would give it, then be the command."""
    for path, stream in ((os.devnull, 0), (f"{said}/output", 1), (f"{said}/errors", 2)):
        file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)
    os.chdir(folder)
    sys.argv = [script, *words]
    if script != "oxrl":
        sys.path.insert(0, os.path.dirname(script))
        runpy.run_path(script, run_name="__main__")
        return
    from oxrl.cli import main

    main()


class Command:
    """`oxrl …` while it runs.

    Args:
        words: behind `oxrl`.
        folder: that it is given in.
        script: a Python file to run in place of `oxrl`.
    """

    def __init__(self, *words: object, folder: Path, script: Path | str = "oxrl") -> None:
        self.output = self.errors = ""
        self._said = Path(tempfile.mkdtemp(prefix="oxrl-said-"))
        for name in ("output", "errors"):
            (self._said / name).touch()
        texts = [str(word) for word in words]
        self.process = forked(_serve, str(script), texts, str(folder), str(self._said))
        self.process.start()

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the signal that ended it."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, seconds: float) -> int:
        """Its exit code; a command that has not ended by then is killed, and the test fails."""
        self.process.join(seconds)
        code = self.returncode
        if code is None:
            self.process.kill()
            self.process.join()
        self.output = (self._said / "output").read_text(errors="replace")
        self.errors = (self._said / "errors").read_text(errors="replace")
        shutil.rmtree(self._said)
        assert code is not None, f"no end after {seconds:g} s; it said: {self.errors}"
        return code


def oxrl(
    *words: object, folder: Path, script: Path | str = "oxrl", seconds: float = 200
) -> subprocess.CompletedProcess[str]:
    """Give a command and wait for its end.

    Args:
        words: behind `oxrl`.
        folder: that it is given in.
        script: a Python file to run in place of `oxrl`.
        seconds: after which the test fails.

    Returns:
        its exit code and what it wrote.
    """
    command = Command(*words, folder=folder, script=script)
    code = command.wait(seconds)
    given = [str(script), *map(str, words)]
    return subprocess.CompletedProcess(given, code, command.output, command.errors)
