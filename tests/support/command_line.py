"""`oxrl …` in a process of its own, without waiting for its imports each time.

Importing torch and transformers takes longer than most commands that tests give. One server, which
parallel test processes share, imports them once and forks: each command still has a process of its
own, with its own streams, folder, environment and exit code, and can be killed. What a command
imports, and how long it takes to start, is tested in tests/cli/test_cli.py with fresh interpreters.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

PRELOADED = ["support.warm_start"]
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(PRELOADED)
# The sockets of servers that several test processes share: of most runs, and of those on the device
# that is none (pretend_device.py).
SHARED = "OXRL_TEST_FORK_SERVER"
PRETEND = "OXRL_TEST_PRETEND_SERVER"
IMPORTED = {SHARED: PRELOADED, PRETEND: ["support.pretend_start"]}
WAIT_THEN_SERVE = """\
import select, sys
from multiprocessing.forkserver import main
listener, alive = map(int, sys.argv[1:3])
if listener in select.select([listener, alive], [], [])[0]:
    main(listener, alive, sys.argv[3:])
"""


def _paths_of_modules() -> dict[str, str]:
    """Python 3.11 does not tell a server where this process looks for modules."""
    paths = {"OXRL_TEST_PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return paths | {"PYTHONPATH": os.pathsep.join(sys.path)}


def share_server(folder: Path, which: str = SHARED) -> Callable[[], object]:
    """Start what becomes the server of every test process that is started later, when the first of
    them asks for a process.

    Args:
        folder: where its socket goes.
        which: the variable that says where the socket is.

    Returns:
        what ends it; it ends with this process, too.
    """
    address = str(folder / which)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, ours = os.pipe()
        server = subprocess.Popen(
            [
                sys.executable,
                *("-c", WAIT_THEN_SERVE, str(listener.fileno()), str(alive), *IMPORTED[which]),
            ],
            # What runs say that nobody reads. Why it cannot start, a test alone (without -n) tells.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(listener.fileno(), alive),
            env=os.environ | _paths_of_modules(),
        )
        os.close(alive)
    os.environ[which] = address

    def end() -> None:
        os.close(ours)
        server.wait(60)

    return end


@cache
def _use_shared_server() -> None:
    """`multiprocessing` has no public way to say that a server runs already."""
    server = forkserver._forkserver
    server._forkserver_address = os.environ[SHARED]
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running


def forked(target: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """A process that will call `target(*arguments)`, forked from the only server there is: ranks and
    runs that are going to be killed are forked from it too.
    """
    if SHARED in os.environ:
        _use_shared_server()
    else:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in _paths_of_modules().items():
                patch.setenv(name, value)
            forkserver.ensure_running()
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return WARM.Process(target=_in_test, args=(test, target, *arguments))


@contextmanager
def from_server(which: str) -> Iterator[None]:
    """A process that is started inside is forked from another shared server than the usual one."""
    server = forkserver._forkserver
    usual = vars(server).copy()
    server._forkserver_address = os.environ[which]
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running
    try:
        yield
    finally:
        os.close(server._forkserver_alive_fd)
        vars(server).clear()
        vars(server).update(usual)


def _in_test(test: str, target: Callable[..., object], *arguments: object) -> None:
    """The server's environment does not say which test asked (tests/processors notes it)."""
    os.environ["PYTEST_CURRENT_TEST"] = test
    if "OXRL_TEST_THREADS" in os.environ:  # the server has one
        import torch

        torch.set_num_threads(int(os.environ["OXRL_TEST_THREADS"]))
    target(*arguments)


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
