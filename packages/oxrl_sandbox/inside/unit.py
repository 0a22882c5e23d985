"""The unit: a warm process inside the sandbox that judges one program after the other.

For each it forks two processes. The judged one reads the program, is confined, and runs it. The
grader reads the tests and says what they found. Neither program nor tests are ever in the memory of
this process, so no judged process inherits anything of another's, or of its own tests. What the
grader says goes straight outside, by a pipe that the judged process has no end of.

Messages come on one descriptor: of a job its header, its program and its tests. Results go back on
another: what the grader found, if it came to that, and how both processes ended.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from oxrl.usercode import descendants
from oxrl_sandbox.inside import confine, filters, folders, grader, judged, kernel, plain, room
from oxrl_sandbox.inside.confine import Confinement, Limits
from oxrl_sandbox.inside.plain import Json

# What a confined process does with its message, to the status that it ends with; and what reads
# that message before, where it does not simply come by the control.
Live = Callable[[Json], int]
Prepare = Callable[[], Json]
# Imported once and there in every fork: what programs commonly use.
WARM = (
    "array",
    "abc",
    "bisect",
    "cmath",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "operator",
    "queue",
    "random",
    "re",
    "statistics",
    "string",
    "time",
    "traceback",
    "typing",
)
CHUNK = 1 << 16
# What a process says when every layer is around it.
CONFINED = b"confined"
# Exit status of a grader that lost the program, which gets so long to tell how it ended.
LOST = 3
LAST_WORDS_S = 0.2
# That of a grader to which a program printed what is right: it still has to end, and well.
RIGHT = 4
# How often the size of the folder is looked at where nothing else limits it, in seconds.
LOOK_S = 0.1
# How often it is asked whether a process has ended, in seconds.
SOON_S = 0.0002


class Broken(Exception):
    """A process could not be confined: nothing was run in it."""


class Gone(BaseException):
    """Nobody wants results any more."""


@dataclass
class Unit:
    """Judges programs under one confinement; works in /proc, as it is outside of any room.

    Args:
        around: put around every process.
        control: descriptor that messages come by.
        results: descriptor of what comes of them.
        config: `base_bytes`, address space of this process; `watch`: end when the control is
            closed, else when all that came by it is done; `room`: this is the first process of a
            namespace of its own.
    """

    around: Confinement
    control: int
    results: int
    config: Json

    def prove(self) -> str:
        """Try what must not be possible, in a process confined as judged code will be.

        Returns:
            What was possible; empty if nothing was.

        Raises:
            Broken: the process could not be confined.
        """
        reading, writing = os.pipe()

        def attempt(_nothing: Json) -> int:
            os.write(writing, escapes(self.around).encode())
            return 0

        child = self._fork(self.around, attempt, [writing], prepare=dict)
        os.close(writing)
        found = os.read(reading, CHUNK)
        os.close(reading)
        end = time.monotonic() + self.around.limits.wall_s
        ended = self._end(child, self._wait(child, end))
        if ended["status"] != 0:
            raise Broken(f"the trial of the sandbox ended with {ended['status']}")
        return found.decode()

    def judge(self, header: Json) -> None:
        """Do one job, and say how its processes ended.

        Args:
            header: `id`, `limits`, `partial`, and `kind`: "calls" of functions, or a "case" of what
                is printed for what is read, compared or only told.
        """
        self.around = replace(self.around, limits=Limits(**header["limits"]))
        try:
            judge = self._calls if header["kind"] == "calls" else self._case
            result = judge(header)
        except Broken as error:
            result = {"broken": str(error)}
        finally:
            self._clean()
        plain.send(self.results, {"id": header["id"], **result})

    def _calls(self, header: Json) -> Json:
        """Judge functions by tests that call them."""
        ours, theirs = socket.socketpair()

        def answer(program: Json) -> int:
            judged.serve(theirs.fileno(), program)
            return 0

        def grade(tests: Json) -> int:
            server = grader.Judged(ours.fileno(), progress)
            graded = grader.grade(server, tests, partial=header["partial"])
            self._tell(graded)
            return LOST if "lost" in graded else 0

        with ours, theirs:
            program = self._fork(self.around, answer, [theirs.fileno()])
            progress = mmap.mmap(-1, mmap.PAGESIZE)  # after the fork: the program has no part in it
            tests = self._fork(self._for_tests(), grade, [ours.fileno(), self.results])
        ends = self._ends(tests, program)
        result = {"waiting": bool(progress[0]), "answered": bool(progress[1])}
        progress.close()
        return result | ends

    def _case(self, _header: Json) -> Json:
        """Judge a program by what it prints for what it reads."""
        reading, writing = os.pipe()

        def connect() -> Json:
            program = plain.receive(self.control)
            source = folders.held_text(program["input"])
            os.dup2(source, 0)
            os.dup2(writing, 1)
            os.close(source)
            return program

        def run(program: Json) -> int:
            return judged.run_as_main(program["code"])

        def compare(tests: Json) -> int:
            if tests.get("shown"):
                graded = grader.read_output(reading)
            else:
                graded = grader.compare_output(reading, tests["output"])
            self._tell(graded)
            return RIGHT if graded["held"] else 0

        program = self._fork(self.around, run, [], prepare=connect)
        os.close(writing)
        tests = self._fork(self._for_tests(), compare, [reading, self.results])
        os.close(reading)
        return {"waiting": True, "answered": True, **self._ends(tests, program)}

    def _ends(self, tests: int, program: int) -> Json:
        """Wait for the processes of a job, end what is left of them, and say how each ended."""
        end = time.monotonic() + self.around.limits.wall_s
        late = self._wait(tests, end)
        of_tests = self._end(tests, late)
        if of_tests["status"] == LOST:
            self._wait(program, time.monotonic() + LAST_WORDS_S)
        elif of_tests["status"] == RIGHT:
            late = self._wait(program, end)
        return {"tests": of_tests, "program": self._end(program, late)}

    def _tell(self, graded: Json) -> None:
        """Say what the tests found; in the grader. One short write, which is whole or nothing:
        nobody writes there before it, and the pipe has room for what `grader` lets through.
        """
        plain.send(self.results, {"graded": graded})

    def _for_tests(self) -> Confinement:
        """The confinement of a grader: with twice the time, so that the program's ends first."""
        limits = self.around.limits
        return replace(self.around, limits=replace(limits, cpu_s=2 * limits.cpu_s))

    def _fork(
        self, around: Confinement, live: Live, kept: list[int], prepare: Prepare | None = None
    ) -> int:
        """Start a confined process.

        Args:
            around: the layers.
            live: what the process does with its message once it is confined; it ends with what this
                returns.
            kept: descriptors that it keeps.
            prepare: called there before, for its message; None: that is the next of the control.

        Raises:
            Broken: it could not be confined, and did nothing.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            status = 125
            try:
                message = prepare() if prepare else plain.receive(self.control)
                confine.confine(around, [*kept, writing], self.config["base_bytes"])
                random.seed(0)
                os.write(writing, CONFINED)
                os.close(writing)
                status = live(message)
            except OSError as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(status)
        os.close(writing)
        said = os.read(reading, CHUNK)
        os.close(reading)
        if said != CONFINED:
            self._end(child, late=True)
            raise Broken(said.decode(errors="replace") or "a process died while it was confined")
        return child

    def _wait(self, child: int, end: float) -> bool:
        """Wait until a process has ended, or has to: at `end` of the monotonic clock.

        Returns:
            Whether it had not ended then.

        Raises:
            Gone: nobody wants results any more.
        """
        poll = select.poll()
        if self.config["watch"]:
            poll.register(self.control, 0)  # told of its end alone
        with _watched(child) as watched:
            pause_s = SOON_S
            if watched is not None:
                poll.register(watched, select.POLLIN)
                pause_s = LOOK_S
            while _is_running(child):
                left = end - time.monotonic()
                if left <= 0 or self._is_full():
                    return True
                if self.control in dict(poll.poll(1000 * min(left, pause_s))):
                    raise Gone
        return False

    def _end(self, child: int, late: bool) -> Json:
        """Kill a process; what it left behind is ended by `_clean`.

        Returns:
            `status`: exit status, or minus the signal; None: it did not end by itself, and then
            `late`: the time was over; `starved`: in that time it had stood in line for a processor
            for longer than it may wait, or nobody knows for how long; `full`: it had written more
            than it may.
        """
        by_itself = not _is_running(child)
        full = late and self._is_full()
        starved = late and not full and self._delay_s(child) > self.around.limits.wait_s
        os.kill(child, signal.SIGKILL)
        # Without a limit, on purpose: a killed process that stays is in a call that the kernel does
        # not cut short, and nothing here could go on beside it. Whoever sent the job has a limit,
        # and ends this unit then with all that is in it.
        _, status = os.waitpid(child, 0)
        if by_itself:
            status = os.waitstatus_to_exitcode(status)
            return {"status": status, "late": False, "starved": False, "full": False}
        return {"status": None, "late": late, "starved": starved, "full": full}

    def _is_full(self) -> bool:
        """True if the folder holds more than it may; in a room its file system keeps it from
        that.
        """
        most = self.around.limits.disk_mb << 20
        return not self.config["room"] and folders.size(self.around.folder) > most

    def _delay_s(self, child: int) -> float:
        """Seconds that the main thread of a child, which is not waited for yet, has stood in line
        for a processor; infinite where nobody tells.

        Source: proc(5), fdinfo of a pidfd; sched-stats.rst of the kernel, /proc/pid/schedstat.
        """
        waited_ns = 0
        with contextlib.suppress(OSError), _watched(child) as watched:
            # Its number there, which may be another than here.
            told = Path(f"self/fdinfo/{watched}").read_text().partition("Pid:")[2]
            waited_ns = int(Path(told.split()[0], "schedstat").read_text().split()[1])
        # None at all: this kernel does not count.
        return waited_ns / 1e9 or float("inf")

    def _clean(self) -> None:
        """Leave nothing of a program: no process and no file."""
        descendants.end_all()
        if not self.config["room"]:
            folders.empty(self.around.folder)
        elif os.listdir(self.around.folder):
            room.fresh_folder(self.around.limits.disk_mb)
            if self.around.rules is not None:
                os.close(self.around.rules)
                self.around = replace(self.around, rules=rules_for(self.around.folder))


@contextlib.contextmanager
def _watched(child: int) -> Iterator[int | None]:
    """A descriptor that can be read once a process has ended; None where there is no such thing."""
    try:
        fd = os.pidfd_open(child)
    except (AttributeError, OSError):
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _is_running(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def escapes(around: Confinement) -> str:
    """Try everything that this process should not be able to do, and name what succeeds.

    Args:
        around: what is supposed to confine it.

    Returns:
        Joined by commas; empty if nothing succeeded.
    """
    outside = os.path.dirname(os.path.realpath(around.folder))
    attempts: dict[str, Callable[[], object]] = {
        "open a socket": socket.socket,
        "start a process": _start_process,
        "signal its parent": lambda: os.kill(os.getppid(), 0),
        "read its parent's memory": lambda: open(f"/proc/{os.getppid()}/mem").close(),
        "change a mode": lambda: os.chmod(around.folder, 0o700),
        "change times": lambda: os.utime(around.folder),
    }
    if around.rules is not None:
        attempts |= {
            "read the machine's users": lambda: open("/etc/passwd").read(),
            "write outside of its folder": lambda: open(os.path.join(outside, "oxrl"), "w").close(),
        }
    found: list[str] = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except OSError:
            continue
        found.append(name)
    return ", ".join(found)


def _start_process() -> None:
    if os.fork() == 0:
        os._exit(0)


def rules_for(folder: str) -> int:
    """The Landlock rules of judged code.

    Args:
        folder: path that it may write to, beside /dev/null.

    Returns:
        A descriptor, for `landlock_restrict`.

    Raises:
        OSError: the kernel has no Landlock.
    """
    return kernel.landlock_rules(confine.readable_paths(), [folder, "/dev/null"])


def confinement(config: Json, folder: str, user: int | None) -> Confinement:
    """Make what confines judged code at the level, and take this process's own part in it.

    Args:
        config: see `main`.
        folder: that judged code writes to.
        user: that judged code becomes; None: it stays who it is.

    Returns:
        What `confine` applies to every judged process.

    Raises:
        OSError: a layer cannot be had.
    """
    if sys.platform == "linux":
        kernel.hide_memory()
        kernel.drop_bounding_set()
        descendants.adopt_orphans()
    limits = Limits(**config["limits"])
    if config["level"] == "off":
        return Confinement(folder, limits)
    if kernel.machine() not in filters.ARCHITECTURES:
        raise OSError(f"no list of system calls for {kernel.machine() or sys.platform}")
    rules = rules_for(folder) if config["landlock"] else None
    library = os.path.dirname(os.__file__)
    return Confinement(
        folder,
        limits,
        rules=rules,
        filtered=True,
        user=user,
        may_read_all=rules is not None and not confine.reachable_by_others(library),
        # Those of namespaces of its own can be counted by themselves.
        threads=confine.MOST_THREADS if config["room"] else confine.MOST_THREADS_OF_USER,
    )


def live(config: Json, control: int, results: int, user: int | None) -> int:
    """A unit's whole life, in the namespaces where it stays.

    Args:
        config: see `main`.
        control: descriptor of jobs.
        results: descriptor of what comes of them.
        user: that judged code becomes.

    Returns:
        An exit status.
    """
    folder = room.FOLDER if config["room"] else os.path.abspath(config["folder"])
    try:
        around = confinement(config, folder, user)
        os.fchdir(config["processes"])
        unit = Unit(around, control, results, config)
        possible = unit.prove() if around.filtered else ""
        if possible:
            raise OSError(f"judged code could still {possible}")
    except (OSError, Broken) as error:
        plain.send(results, {"failed": str(error)})
        return 1
    plain.send(results, {"ready": True})
    gc.collect()
    gc.freeze()
    try:
        while True:
            unit.judge(plain.receive(control))
    except (plain.Closed, Gone):
        return 0


def ordinary_user(config: Json) -> int | None:
    """The user that judged code becomes where this is root, whose folder is then that user's.

    Args:
        config: see `main`; its `folder` changes its owner.

    Returns:
        A user's number. None: it stays who it is, for this is not root, or these namespaces have no
        other user.
    """
    if os.getuid() != 0:
        return None
    try:
        os.chown(config["folder"], confine.NOBODY, confine.NOBODY)
    except OSError:
        return None
    return confine.NOBODY


def main(control: int, results: int) -> int:
    """Read the configuration, go where it says, and live there.

    The first message holds `level`; `limits`; `landlock`: whether to use it; `room`: whether to
    make namespaces; `folder`: what judged code writes to, outside of a room; `mount_point`;
    `watch`: see `Unit`.

    Args:
        control: descriptor that the configuration comes on, and then jobs.
        results: descriptor of what comes of them; first, whether this is ready.

    Returns:
        An exit status: 0 once nobody sends jobs any more, 1 where it could not begin.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = plain.receive(control)
    for name in WARM:
        __import__(name)
    config["base_bytes"] = folders.address_space()
    # Where there is no /proc, nothing of what is looked for is there.
    config["processes"] = os.open("/proc" if os.path.isdir("/proc") else "/", os.O_RDONLY)
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    os.close(nothing)
    if not config["room"]:
        user = ordinary_user(config) if config["level"] != "off" else None
        return live(config, control, results, user)
    there = partial(live, config, control, results)
    try:
        return room.in_room(there, config["mount_point"], config["limits"]["disk_mb"])
    except OSError as error:
        plain.send(results, {"failed": f"namespaces: {error}"})
        return 1
