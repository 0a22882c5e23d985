"""The outside of a sandbox: starts a unit where a level says, and hands it programs to judge."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Literal

from oxrl.runs.waiting import end_of
from oxrl_sandbox import bundle
from oxrl_sandbox.findings import Job, Json, SandboxError, Verdict, finding
from oxrl_sandbox.inside import confine, kernel, plain
from oxrl_sandbox.inside.confine import Limits

Level = Literal["strict", "basic", "off"]
LEVELS: tuple[Level, ...] = ("strict", "basic", "off")
# A unit gets so long to start, and so much longer than a program to answer.
START_S = 20.0
MARGIN_S = 5.0
# How often it is asked whether those who judge meanwhile have ended, in seconds.
TURN_S = 0.01
MOST_LAST_WORDS = 500
FOLDER_OF_BUBBLEWRAP = "/job"


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to get what a level promises.

    room: the unit makes namespaces itself. wrapper: a program that makes them around it.
    """

    name: str
    room: bool = False
    wrapper: tuple[str, ...] = ()


def ways(level: Level) -> list[Way]:
    """List the ways to get a level on this machine, best first.

    Args:
        level: "strict", "basic" or "off".

    Returns:
        At least one; whether it works is known when it is tried.
    """
    if level != "strict":
        return [Way(level)]
    found = [Way("namespaces", room=True)]
    if bubblewrap := shutil.which("bwrap"):
        found.append(Way("bubblewrap", wrapper=bubblewrap_command(bubblewrap)))
    return found


def bubblewrap_command(program: str) -> tuple[str, ...]:
    """Write the command by which bubblewrap makes the namespaces: it may be allowed to, we may not.

    Args:
        program: path of `bwrap`.

    Returns:
        The command line, to which the program to be run is appended.
    """
    options = "--unshare-all --die-with-parent --new-session --clearenv --cap-drop ALL --dev /dev"
    command = [program, *options.split(), "--tmpfs", FOLDER_OF_BUBBLEWRAP]
    for path in (*confine.readable_paths(), interpreter()):
        if path in confine.DEVICES:
            continue
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    return tuple(command)


def interpreter() -> str:
    """The Python that units run on: this one, outside of any virtual environment."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(base)


class Sandbox:
    """A warm unit of one level. Used by one thread at a time; the next waits.

    Args:
        level: what is promised; never less.
        limits: of each program.

    Raises:
        SandboxError: in `start` and `judge`, the level cannot be had here; says why.
    """

    def __init__(self, level: Level, limits: Limits) -> None:
        self.level: Level = level
        self.limits = limits
        self.way = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()
        self._jobs = 0

    def start(self) -> None:
        """Start the unit and have it prove that its layers hold; nothing if it runs already."""
        with self._lock:
            self._start()

    def judge(self, job: Job, *, alone: bool = False) -> Verdict:
        """Have a program judged; starts the unit if it is not running.

        Args:
            job: the program, its tests and how they are run.
            alone: no other is judged meanwhile by this installation of oxRL.

        Returns:
            What the tests found, or why the program failed them.

        Raises:
            SandboxError: nothing is known of the program; the unit is ended, and the next job
                starts another.
        """
        asked = time.monotonic()
        with self._lock, turn(self.limits.wall_s, alone=alone) as had_turn:
            self._start()
            waited_s = time.monotonic() - asked
            self._jobs += 1
            limits = dataclasses.asdict(self.limits)
            header = {"id": self._jobs, "kind": job.kind, "partial": job.partial, "limits": limits}
            graded: Json | None = None
            try:
                fd = self._wait_at_most(self.limits.wall_s + MARGIN_S)
                for message in (header, job.program, job.tests):
                    plain.send(fd, message)
                reply = plain.receive(fd)
                if "graded" in reply:
                    graded = reply["graded"]
                    reply = plain.receive(fd)
            except (plain.Closed, plain.TooLong) as error:
                raise SandboxError(f"the sandbox failed: {_why(error)}{self._close()}") from error
            if "broken" in reply or reply.get("id") != self._jobs:
                problem = reply.get("broken", "it answered something else")
                raise SandboxError(f"the sandbox failed: {problem}{self._close()}")
            found = finding(job.kind, self.limits, graded, reply)
            if alone and found.starved and not had_turn:
                raise SandboxError(
                    f"others were judged for all of {self.limits.wall_s:g} s, and beside them this "
                    "program had too little of a processor to end. Lower reward.workers"
                )
            return dataclasses.replace(found, waited_s=waited_s)

    def close(self) -> None:
        """End the unit; the next program starts another."""
        with self._lock:
            self._close()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._close()
        problems: list[str] = []
        for way in ways(self.level):
            try:
                self._start_by(way)
            except (OSError, plain.Closed, SandboxError) as error:
                problems.append(f"{way.name}: {_why(error)}{self._close()}")
            else:
                self.way = way.name
                return
        raise SandboxError("; ".join(problems))

    def _start_by(self, way: Way) -> None:
        if self.level != "off" and not kernel.landlock_version():
            where = "this kernel" if kernel.machine() else "this system is no Linux and"
            raise SandboxError(f"{where} has no Landlock (Linux 5.13 and newer, if switched on)")
        self._folder = tempfile.TemporaryDirectory(
            prefix="oxrl-sandbox-", ignore_cleanup_errors=True
        )
        folder = FOLDER_OF_BUBBLEWRAP
        if not way.wrapper:
            folder = os.path.join(self._folder.name, "job")
            os.chmod(self._folder.name, 0o711)
            os.mkdir(folder)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*way.wrapper, *bundle.command(interpreter())],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                cwd="/",
                env=environment(),
            )
        config: Json = {
            "level": self.level,
            "limits": dataclasses.asdict(self.limits),
            "landlock": True,
            "room": way.room,
            "folder": folder,
            "mount_point": self._folder.name,
            "watch": True,
        }
        fd = self._wait_at_most(START_S)
        for message in (bundle.sources(), config):
            plain.send(fd, message)
        said = plain.receive(fd)
        if "failed" in said:
            raise SandboxError(str(said["failed"]))

    def _wait_at_most(self, seconds: float) -> int:
        """The descriptor of the socket, where each part of a message may be waited for so long."""
        assert self._socket is not None
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)
        return self._socket.fileno()

    def _close(self) -> str:
        """End the unit.

        Returns:
            What it said last of itself, ready to be put behind an error.
        """
        process = self._process
        self._process = None
        said = ""
        if self._socket is not None:
            self._socket.close()
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.kill()
            end_of(process, "a sandbox")
            said = _last_words(process)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        return said


@contextlib.contextmanager
def turn(patience_s: float, *, alone: bool) -> Iterator[bool]:
    """Wait for a turn to judge: alone, or beside others.

    Who wants to be alone closes a gate, where all who come next wait, and then waits for those who
    are at it. Two files of the package stand for that: nobody has to make them.

    Args:
        patience_s: seconds after which nobody is waited for any more.
        alone: no other judges inside the block.

    Returns:
        A context manager, which gives whether all were waited for.

    Raises:
        SandboxError: the file system of the package has no locks.
    """
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    end = time.monotonic() + patience_s
    with open(__file__) as gate, open(kernel.__file__) as judging:
        try:
            for lock in (gate, judging):
                while time.monotonic() < end:
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(lock, kind | fcntl.LOCK_NB)
                        break
                    time.sleep(TURN_S)
        except OSError as error:
            raise SandboxError(f"cannot lock files of {gate.name}'s folder: {error}") from error
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield time.monotonic() < end


def _why(error: Exception) -> str:
    if isinstance(error.__cause__, BlockingIOError):
        return "it did not answer in time"
    return str(error) or "it ended"


def _last_words(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    with process.stderr as stream:
        os.set_blocking(stream.fileno(), False)  # who else has it may live on
        text = (stream.read() or b"").decode(errors="replace").strip()
    return f" ({text[-MOST_LAST_WORDS:]})" if text else ""


def environment() -> dict[str, str]:
    """All that a unit inherits. Sets and dictionaries have the same order every time."""
    inherited = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    if "LD_LIBRARY_PATH" in os.environ:
        inherited["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return inherited
