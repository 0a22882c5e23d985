"""Programs that try to get out, to do harm or to be judged right: each gets 0, nothing outside is
touched, and the next program is judged as if nothing had been.

As root the same is done once more as an ordinary user, in a process of its own: this file is also a
program, `python test_hostile_programs.py LEVEL`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT), str(ROOT / "packages")]

from oxrl.types import Score  # noqa: E402
from oxrl_sandbox import client  # noqa: E402
from oxrl_sandbox.client import Level, Sandbox, interpreter  # noqa: E402
from oxrl_sandbox.code_reward import judged  # noqa: E402
from oxrl_sandbox.inside.confine import Limits, reachable_by_others  # noqa: E402
from oxrl_sandbox.layers import why_not  # noqa: E402
from support.hostile_programs import ADD, programs  # noqa: E402

ORDINARY_USER = 1000
RIGHT = "def add(a, b): return a + b\n"
# At least one of each kind for every commit; `make test-full` runs all, on every level.
EVERY = 8


@contextmanager
def outside() -> Iterator[dict[str, str]]:
    """What programs try to reach, by the words that stand for it in them."""
    os.environ["OXRL_TEST_SECRET"] = "secret"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o777)
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        before = secret.stat()
        server.setblocking(False)
        port = server.getsockname()[1]
        yield {"OUTSIDE": folder, "HOME": str(Path.home()), "PORT": str(port)}
        assert os.listdir(folder) == ["secret"]
        assert secret.stat()[:7] + secret.stat()[8:] == before[:7] + before[8:]  # but when read
        try:
            server.accept()
        except BlockingIOError:
            return
        raise AssertionError("a program has connected to a server outside")


def verdict(sandbox: Sandbox, code: str, tests: object) -> Score:
    return judged(sandbox, code, tests, partial=False, total_s=300)


def wrong_verdicts(level: Level, every: int = 1, only: str = "") -> list[str]:
    """The programs whose names begin so that did not get 0, and those after which a right one did
    not get 1.
    """
    wrong: list[str] = []
    sandbox = Sandbox(level, Limits(cpu_s=1.0, memory_mb=256, disk_mb=16, wait_s=2.0))
    try:
        with outside() as words:
            chosen = [program for program in programs() if program[0].startswith(only)]
            for name, code, tests in chosen[::every]:
                for word, value in words.items():
                    code = code.replace(word, value)
                score = verdict(sandbox, code, tests)
                if score.value != 0.0:
                    wrong.append(f"{name}: {score}")
                after = verdict(sandbox, RIGHT, ADD)
                if after.value != 1.0:
                    wrong.append(f"after {name}: {after}")
    finally:
        sandbox.close()
    return wrong


def ordinary_python() -> str:
    """A Python that an ordinary user of this machine can start; empty where there is none."""
    found = [
        interpreter(),
        *filter(None, (shutil.which(name) for name in ("python3", "python3.11"))),
    ]
    found += ["/usr/bin/python3", "/usr/local/bin/python3"]
    for python in found:
        if os.path.exists(python) and reachable_by_others(
            os.path.dirname(os.path.realpath(python))
        ):
            new_enough = "import sys; sys.exit(sys.version_info < (3, 11))"
            if subprocess.run([python, "-c", new_enough], check=False).returncode == 0:
                return python
    return ""


if __name__ == "__main__":
    for line in wrong_verdicts(sys.argv[1], int(sys.argv[2]), sys.argv[3]):  # pyright: ignore
        sys.stdout.write(line + "\n")
    sys.exit(0)

import pytest  # noqa: E402


def need(level: Level) -> None:
    why = why_not(level)
    if why:
        pytest.skip(f"this machine has no sandbox of level {level}: {why}")


def as_ordinary_user(level: Level, every: int, only: str = "") -> str:
    """What `wrong_verdicts` prints as an ordinary user."""
    python = ordinary_python()
    if os.getuid() != 0 or not python or not reachable_by_others(str(ROOT)):
        pytest.skip("needs root, and a Python and a checkout that other users can read")
    done = subprocess.run(
        [python, "-B", str(Path(__file__)), level, str(every), only],
        env={"PATH": os.environ["PATH"], "HOME": "/"},
        cwd="/",
        user=ORDINARY_USER,
        group=ORDINARY_USER,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_many_hostile_programs() -> None:
    assert len({code for _, code, _ in programs()}) >= 80


# Seconds: programs that use up their time are among them.
@pytest.mark.parametrize("level", ["strict", "basic"])
def test_some_hostile_programs_get_nothing(level: Level) -> None:
    need(level)
    assert wrong_verdicts(level, EVERY) == []


def test_some_hostile_programs_get_nothing_as_an_ordinary_user() -> None:
    need("strict")
    assert as_ordinary_user("strict", EVERY) == ""


@pytest.mark.parametrize("level", ["strict", "basic"])
def test_files_of_the_same_ordinary_user_stay_as_they_are(level: Level) -> None:
    need(level)
    assert as_ordinary_user(level, 1, "files") == ""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", ["strict", "basic"])
def test_no_hostile_program_gets_anything(level: Level) -> None:
    need(level)
    assert wrong_verdicts(level) == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_no_hostile_program_gets_anything_through_bubblewrap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (found,) = (way for way in client.ways("strict") if way.name == "bubblewrap")
    monkeypatch.setattr(client, "ways", lambda level: [found])
    need("strict")
    assert wrong_verdicts("strict") == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", ["strict", "basic"])
def test_no_hostile_program_gets_anything_as_an_ordinary_user(level: Level) -> None:
    need(level)
    assert as_ordinary_user(level, 1) == ""
