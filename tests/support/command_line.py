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
from importlib.util import find_spec
from multiprocessing.context import ForkServerProcess
from pathlib import Path

PRELOADED = [
    "conformance",  # of the ranks in tests/engines
    "oxrl.assembly.assemble",
    "oxrl.assembly.assemble_offline",
    "oxrl.assembly.assemble_preference",
    "oxrl.assembly.opening",
    "oxrl.cli",
    "oxrl.commands.loop",
    "oxrl.commands.train",
    "oxrl.engines.train.fsdp",
    "oxrl.plan.preflight",
    "oxrl.recipes.reward_model",
    "oxrl.recipes.supervised",
    "oxrl.rewards.workers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    *(["deepspeed"] if find_spec("deepspeed") else []),
]
# The only fork server of a test process: ranks and runs that are going to be killed use it too.
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(PRELOADED)


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
        arguments = (str(script), texts, str(folder), str(self._said))
        self.process: ForkServerProcess = WARM.Process(target=_serve, args=arguments)
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
