"""The sandbox as a machine: levels are kept or refused, layers are told, services can be used."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from oxrl.types import Score
from oxrl_sandbox import client, layers, remote
from oxrl_sandbox.client import Level, Sandbox
from oxrl_sandbox.code_reward import code_reward, judged
from oxrl_sandbox.findings import Job, SandboxError, Verdict, finding
from oxrl_sandbox.inside import confine, filters, folders, grader, kernel, plain, unit
from oxrl_sandbox.inside import judged as judged_process
from oxrl_sandbox.inside.confine import Confinement, Limits

LIMITS = Limits(cpu_s=2.0, memory_mb=256, disk_mb=8)
ADD = {"tests": ["assert add(1, 2) == 3"]}
RIGHT = "def add(a, b): return a + b\n"
LINUX = pytest.mark.skipif(not kernel.machine(), reason="the layers are those of Linux")


@LINUX
def test_a_level_that_cannot_be_had_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    for level in ("strict", "basic"):
        assert "no Landlock" in layers.why_not(level)
    assert layers.why_not("off") == ""


@LINUX
@pytest.mark.parametrize("broken", ["filters", "landlock"])
def test_a_layer_that_does_not_hold_is_found_before_any_program_runs(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is sent into the sandbox with one layer taken out: the unit tries what must not work.
    modules = dict(client.bundle.sources())
    name = "oxrl_sandbox.inside.confine"
    line = {
        "filters": "kernel.install_filter(filters.program(kernel.machine(), os.getpid()))",
        "landlock": "kernel.landlock_restrict(around.rules)",
    }[broken]
    assert line in modules[name]
    modules[name] = modules[name].replace(line, "pass")
    monkeypatch.setattr(client.bundle, "sources", lambda: modules)
    sandbox = Sandbox("basic", LIMITS)
    with pytest.raises(SandboxError, match="judged code could still"):
        sandbox.start()
    sandbox.close()


@LINUX
@pytest.mark.parametrize(
    ("calls", "problem"),
    [({"x86_64": '"chmod": 90, "fchmodat": 268,', "aarch64": '"fchmodat": 53,'}, "change a mode"),
     ({"x86_64": '"utimensat": 280,', "aarch64": '"utimensat": 88,'}, "change times")],
)  # fmt: skip
def test_a_filter_that_lets_files_be_changed_is_found_before_any_program_runs(
    calls: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = dict(client.bundle.sources())
    name = "oxrl_sandbox.inside.filters"
    for machine, added in calls.items():
        line = f"{machine.upper()} = {{"
        assert line in modules[name]
        modules[name] = modules[name].replace(line, line + added)
    monkeypatch.setattr(client.bundle, "sources", lambda: modules)
    sandbox = Sandbox("basic", LIMITS)
    with pytest.raises(SandboxError, match=f"could still {problem}"):
        sandbox.start()
    sandbox.close()


@LINUX
def test_no_file_is_emptied_where_landlock_is_too_old_to_forbid_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = dict(client.bundle.sources())
    name = "oxrl_sandbox.inside.kernel"
    line = "version = landlock_version()"
    assert line in modules[name]
    modules[name] = modules[name].replace(line, "version = 1")  # that of Linux 5.13
    monkeypatch.setattr(client.bundle, "sources", lambda: modules)
    sandbox = Sandbox("basic", LIMITS)
    tests = {"tests": ["assert attempt() is None"]}
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            path = Path(folder) / "file"
            path.write_text("much")
            path.chmod(0o666)
            for call in (
                f"os.truncate({str(path)!r}, 0)",
                f"os.close(os.open({str(path)!r}, os.O_WRONLY | os.O_RDWR | os.O_TRUNC))",
            ):
                program = f"import os\ndef attempt(): return {call}\n"
                assert judged(sandbox, program, tests, partial=False).value == 0.0
            assert path.read_text() == "much"
    finally:
        sandbox.close()


@LINUX
def test_files_are_opened_to_read_or_to_write_or_not_at_all() -> None:
    why = layers.why_not("basic")
    if why:
        pytest.skip(why)
    program = (
        "import os\n"
        "def opened(flags):\n"
        "    try:\n"
        "        os.close(os.open('/dev/null', flags))\n"
        "    except OSError as error:\n"
        "        return error.errno\n"
        "    return 0\n"
    )
    neither = os.O_WRONLY | os.O_RDWR
    refused = (os.O_TRUNC, neither, neither | os.O_TRUNC, neither | os.O_NONBLOCK)
    allowed = (
        os.O_RDONLY,
        os.O_WRONLY,
        os.O_RDWR,
        os.O_WRONLY | os.O_TRUNC,
        os.O_RDWR | os.O_TRUNC,
    )
    tests = [f"assert opened({flags}) == {errno.EPERM}" for flags in refused]
    tests += [f"assert opened({flags}) == 0" for flags in allowed]
    sandbox = Sandbox("basic", LIMITS)
    try:
        assert judged(sandbox, program, {"tests": tests}, partial=False) == Score(value=1.0)
    finally:
        sandbox.close()


def test_what_ordinary_programs_do_with_files_works() -> None:
    level = "basic" if not layers.why_not("basic") else "off"
    program = (
        "import os, pathlib, shutil, sqlite3, tempfile, zipfile\n"
        "def attempt():\n"
        "    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as file:\n"
        "        file.write(b'much'); file.flush()\n"
        "        shutil.copyfile(file.name, folder + '/copy')\n"
        "        with open(folder + '/copy', 'r+') as copy: copy.truncate(1)\n"
        "        os.rename(folder + '/copy', 'moved')\n"
        "    pathlib.Path('moved').touch(); pathlib.Path('new').touch()\n"
        "    with sqlite3.connect('base') as base: base.execute('create table t (x)')\n"
        "    zipfile.ZipFile('z', 'w').write('moved'); zipfile.ZipFile('z').extractall('out')\n"
        "    open('new', 'a').write('more')\n"
        "    return open('out/moved').read() + open('new').read()\n"
    )
    sandbox = Sandbox(level, LIMITS)
    try:
        tests = {"tests": ["assert attempt() == 'mmore'"]}
        assert judged(sandbox, program, tests, partial=False).value == 1.0
    finally:
        sandbox.close()


def test_a_program_that_has_closed_its_folder_is_judged_like_any_other() -> None:
    sandbox = Sandbox("off", LIMITS)
    try:
        closes = "import os\nopen('x', 'w').close(); os.chmod('.', 0o300)\n"
        assert judged(sandbox, closes, ADD, partial=False).value == 0.0
        assert judged(sandbox, closes + RIGHT, ADD, partial=False).value == 1.0
        empty = "import os\nseen = os.listdir('.')\ndef add(a, b): return 3 if not seen else seen\n"
        assert judged(sandbox, empty, ADD, partial=False).value == 1.0
    finally:
        sandbox.close()


# Programs that stand in line for one processor with many others: what a busy machine is.
YIELDS = """
import os, threading, time
threading.stack_size(1 << 16)
def spin():
    end = time.monotonic() + 0.6
    # Less than the limit in sum, however many cores the threads run on.
    while time.monotonic() < end and time.process_time() < 0.6: os.sched_yield()
for _ in range(8): threading.Thread(target=spin).start()
time.sleep(60)
"""
WORKS = "import time\nwhile time.process_time() < 0.25: pass\n"


class Asked(Sandbox):
    """A sandbox that ends others before a program is judged alone.

    Args:
        others: to be ended then.
    """

    def __init__(self, level: Level, limits: Limits, others: list[subprocess.Popen[bytes]]) -> None:
        super().__init__(level, limits)
        self.others = others
        self.alone: list[bool] = []

    def judge(self, job: Job, *, alone: bool = False) -> Verdict:
        self.alone.append(alone)
        while alone and self.others:
            self.others[-1].kill()
            self.others.pop().wait()
        return super().judge(job, alone=alone)


@contextmanager
def busy(count: int = 16) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One processor for this process, what it starts, and `count` that never rest."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usual)})
    command = [sys.executable, "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    started = list(others)
    try:
        yield others
    finally:
        os.sched_setaffinity(0, usual)
        for process in started:
            process.kill()
            process.wait()


@LINUX
@pytest.mark.parametrize("level", ["strict", "basic", "off"])
def test_a_program_that_yields_in_many_threads_keeps_its_zero(level: Level) -> None:
    why = layers.why_not(level)
    if why:
        pytest.skip(why)
    sandbox = Asked(level, Limits(cpu_s=1.0, memory_mb=1024, disk_mb=8, wait_s=1.5), [])
    try:
        score = judged(sandbox, YIELDS + RIGHT, ADD, partial=False)
        assert (score.value, score.status) == (0.0, "ok")
        assert "did not end within" in score.reason
    finally:
        sandbox.close()


@LINUX
@pytest.mark.parametrize("level", ["strict", "off"])
def test_a_program_that_the_machine_was_too_busy_for_is_judged_once_more_alone(
    level: Level,
) -> None:
    why = layers.why_not(level)
    if why:
        pytest.skip(why)
    limits = Limits(cpu_s=1.0, memory_mb=256, disk_mb=8, wait_s=1.0)
    sandbox = Asked(level, limits, [])
    sandbox.start()
    sandbox.close()
    with busy() as others:
        sandbox.others = others
        try:
            assert judged(sandbox, WORKS + RIGHT, ADD, partial=False).value == 1.0
            assert sandbox.alone == [False, True]
        finally:
            sandbox.close()


@LINUX
def test_a_program_that_never_ends_counts_nothing_however_busy_the_machine_is() -> None:
    sandbox = Asked("off", Limits(cpu_s=1.0, memory_mb=256, disk_mb=8, wait_s=1.0), [])
    with busy():
        try:
            score = judged(sandbox, "while True: pass\n", ADD, partial=False)
        finally:
            sandbox.close()
    assert (score.value, score.status) == (0.0, "ok")
    assert sandbox.alone == [False, True]


def test_who_judges_alone_waits_for_others_and_is_waited_for() -> None:
    seen: list[str] = []

    def beside(name: str, seconds: float) -> None:
        with client.turn(9, alone=False):
            seen.append(f"{name} begins")
            time.sleep(seconds)
            seen.append(f"{name} ends")

    first = threading.Thread(target=beside, args=("first", 0.4))
    first.start()
    while not seen:
        time.sleep(0.01)
    later = threading.Thread(target=beside, args=("later", 0.0))
    threading.Timer(0.2, later.start).start()
    with client.turn(9, alone=True):
        seen.append("alone begins")
        time.sleep(0.3)
        seen.append("alone ends")
    first.join()
    later.join()
    assert seen == [
        *("first begins", "first ends", "alone begins", "alone ends", "later begins", "later ends")
    ]
    with client.turn(9, alone=True):
        began = time.monotonic()
        with client.turn(0.3, alone=False):  # nobody is waited for without end
            assert 0.2 < time.monotonic() - began < 5


def test_waiting_for_the_machine_is_no_time_of_the_program() -> None:
    cases = [{"input": f"{number}", "output": f"{number}"} for number in range(3)]
    sandbox = Sandbox("off", Limits(cpu_s=1.0, memory_mb=256, disk_mb=8, wait_s=0.5))
    try:
        with client.turn(9, alone=True):  # who comes next waits 1.5 s, longer than all may take
            score = judged(sandbox, "print(input())", {"cases": cases}, partial=False, total_s=1.4)
    finally:
        sandbox.close()
    assert score.value == 1.0, score.reason


def test_who_could_not_be_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with client.turn(9, alone=True), client.turn(0.1, alone=True) as had_turn:
        assert not had_turn
    # The machine is too busy for the program, first beside others and then again.
    late = Verdict(0, 1, "the program did not end within 1 s", starved=True)
    monkeypatch.setattr(client, "finding", lambda *_: late)
    # Tests beside this one judge, too: of them it waits for as long as it takes.
    patient = Sandbox("off", Limits(cpu_s=1.0, memory_mb=256, disk_mb=8, wait_s=120.0))
    hasty = Sandbox("off", Limits(cpu_s=1.0, memory_mb=256, disk_mb=8, wait_s=0.0))
    try:
        assert judged(patient, RIGHT, ADD, partial=False).value == 0.0
        with client.turn(120, alone=True):
            score = judged(hasty, RIGHT, ADD, partial=False)
    finally:
        patient.close()
        hasty.close()
    assert (score.value, score.status) == (None, "error")
    assert "others were judged for all of 1 s" in score.reason


def test_files_that_cannot_be_locked_are_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_file: object, _kind: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(client.fcntl, "flock", refused)
    began = time.monotonic()
    score = judged(Sandbox("off", LIMITS), RIGHT, ADD, partial=False)
    assert (score.value, score.status) == (None, "error")
    assert "cannot lock" in score.reason and "Bad file descriptor" in score.reason
    assert time.monotonic() - began < LIMITS.wait_s / 2


def test_a_sandbox_that_dies_is_an_error_once_and_then_started_anew() -> None:
    sandbox = Sandbox("off", LIMITS)
    try:
        assert judged(sandbox, RIGHT, ADD, partial=False, total_s=9).value == 1.0
        process = sandbox._process
        assert process is not None
        process.kill()
        process.wait()
        assert judged(sandbox, RIGHT, ADD, partial=False, total_s=9).value == 1.0
    finally:
        sandbox.close()


def test_a_unit_ends_with_the_process_that_started_it() -> None:
    level = "strict" if not layers.why_not("strict") else "off"
    code = (
        "import os, signal\nfrom oxrl_sandbox.client import Sandbox\n"
        "from oxrl_sandbox.inside.confine import Limits\n"
        f"s = Sandbox({level!r}, Limits(2.0, 256, 8)); s.start()\n"
        "print(s._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")
            if state.exists() and state.read_text().split(") ")[1][0] == "Z":
                return  # nobody is left to bury it
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the unit goes on")


def test_what_the_unit_inherits_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    assert set(client.environment()) <= {"PATH", "LANG", "PYTHONHASHSEED", "LD_LIBRARY_PATH"}


def test_the_filter_is_one_for_every_process_of_a_machine() -> None:
    for machine in filters.ARCHITECTURES:
        one = filters.program(machine, 70_000_001)
        other = filters.program(machine, 70_000_002)
        assert len(one) == len(other) and len(one) % 8 == 0 and one != other
        own = struct.pack("I", 70_000_001)
        assert one.replace(own, struct.pack("I", 70_000_002)) == other


# Of <linux/seccomp.h>: what a filter may return, beside 0x00050000 | errno.
KILLED, ALLOWED, FAILS = 0x80000000, 0x7FFF0000, 0x00050000


def filtered(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What a filter returns for a system call, read as <linux/filter.h> has it.

    A filter sees a `struct seccomp_data`: number, architecture, address, six arguments.
    """
    six = [*arguments, *(0,) * (6 - len(arguments))]
    seen = struct.pack("<iIQ6Q", number, architecture, 0, *six)
    held = at = 0
    while True:
        kind, yes, no, value = struct.unpack_from("HBBI", code, 8 * at)
        at += 1
        match kind:
            case 0x20:  # BPF_LD | BPF_W | BPF_ABS
                (held,) = struct.unpack_from("<I", seen, value)
            case 0x54:  # BPF_ALU | BPF_AND | BPF_K
                held &= value
            case 0x15:  # BPF_JMP | BPF_JEQ | BPF_K
                at += yes if held == value else no
            case 0x35:  # BPF_JMP | BPF_JGE | BPF_K
                at += yes if held >= value else no
            case 0x45:  # BPF_JMP | BPF_JSET | BPF_K
                at += yes if held & value else no
            case 0x06:  # BPF_RET | BPF_K
                return value
            case _:
                raise AssertionError(f"no instruction of a filter: {kind:#x}")


# AUDIT_ARCH of <linux/audit.h>, then read, openat, socketpair, sendto and kill of <asm/unistd.h>.
MACHINES = {
    "x86_64": (0xC000003E, (0, 257, 53, 44, 62)),
    "aarch64": (0xC00000B7, (63, 56, 199, 206, 129)),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_lets_calls_pass_by_their_number_and_arguments(machine: str) -> None:
    architecture, (read, openat, socketpair, sendto, kill) = MACHINES[machine]
    code = filters.program(machine, 77)

    def found(number: int, *arguments: int) -> int:
        return filtered(code, architecture, number, *arguments)

    refused = FAILS | errno.EPERM
    assert found(read, 5, 0xFFFF, 3) == ALLOWED
    assert found(9999) == refused
    # Of openat the third argument says how: for reading; for reading, emptied; in the fourth way.
    assert found(openat, 0x200, 3, os.O_RDONLY) == ALLOWED
    assert found(openat, 0, 0, 0x200) == found(openat, 0, 0, 3) == refused
    # A pair of Unix sockets, and no other.
    assert found(socketpair, 1, 2) == ALLOWED
    assert found(socketpair, 2, 1) == found(socketpair, 0, 1) == refused
    # The receiver is the fifth of sendto, of 64 bits: nobody, or one with either half of an address.
    assert found(sendto, 3, 0xFF, 9, 1, 0, 1) == ALLOWED
    for address in (1, 0x7F00, 1 << 32, 5 << 32 | 1):
        assert found(sendto, 3, 0xFF, 9, 1, address, 16) == refused
    assert found(kill, 77, 9) == ALLOWED
    assert found(kill, 78, 9) == found(kill, 0, 77) == refused
    # Numbers mean other calls under another architecture, and so do those of x32.
    others = [arch for arch, _ in MACHINES.values() if arch != architecture]
    assert [filtered(code, arch, read) for arch in (*others, 0x40000003)] == [KILLED] * 2
    if machine == "x86_64":
        assert found(0x40000000 | read) == KILLED


def test_folders_are_emptied_however_deep_and_closed_they_are(tmp_path: Path) -> None:
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(600):
            os.mkdir("deeper")
            os.chdir("deeper")
    finally:
        os.chdir(here)
    closed = tmp_path / "a" / "b"
    closed.mkdir(parents=True)
    (closed / "c").write_text("x")
    closed.chmod(0)
    closed.parent.chmod(0)
    (tmp_path / "top").mkdir()
    tmp_path.chmod(0o300)
    (tmp_path / "link").symlink_to("/")
    assert folders.size(str(tmp_path)) == float("inf")
    folders.empty(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_lies_below_long_names_is_counted(tmp_path: Path) -> None:
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(20):
            os.mkdir("n" * 250)
            os.chdir("n" * 250)
        Path("large").write_bytes(bytes(1 << 20))
    finally:
        os.chdir(here)
    (tmp_path / "link").symlink_to("/usr")
    assert 1 << 20 < folders.size(str(tmp_path)) < 2 << 20
    folders.empty(str(tmp_path))


def test_a_folder_that_goes_while_its_size_is_looked_at_counts_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "below"
    below.mkdir()
    (below / "large").write_bytes(bytes(1 << 20))
    (tmp_path / "small").write_text("x")
    walk = os.fwalk

    def walk_and_remove(*given: Any, **named: Any) -> Iterator[Any]:
        for found in walk(*given, **named):
            shutil.rmtree(below, ignore_errors=True)
            yield found

    monkeypatch.setattr(os, "fwalk", walk_and_remove)
    assert folders.size(str(tmp_path)) == max(4096, (tmp_path / "small").stat().st_blocks * 512)


MOUNTS = """
import os, sys
from pathlib import Path
from oxrl_sandbox.inside import kernel

user, group = os.getuid(), os.getgid()
try:
    kernel.unshare(kernel.NEW_MOUNTS if user == 0 else kernel.NEW_MOUNTS | kernel.NEW_USERS)
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    kernel.mount_private()
    source, target = Path(sys.argv[1], "source"), Path(sys.argv[1], "target")
    kernel.mount_memory(str(source / "below"), megabytes=1, mode="777")
except OSError as error:
    sys.exit(f"no namespaces: {error}")
(source / "below" / "file").write_text("there")
kernel.mount_read_only(str(source), str(target))
print((target / "below" / "file").read_text())
for path in (target / "file", target / "below" / "file"):
    try:
        path.write_text("changed")
    except OSError as error:
        print(error.strerror)
"""


@LINUX
def test_what_is_shown_for_reading_is_shown_with_what_is_mounted_below_it(tmp_path: Path) -> None:
    (tmp_path / "source" / "below").mkdir(parents=True)
    (tmp_path / "target").mkdir()
    command = [sys.executable, "-c", MOUNTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.stderr.startswith("no namespaces"):
        pytest.skip(done.stderr)
    refused = os.strerror(errno.EROFS)
    assert done.stdout.splitlines() == ["there", refused, refused], done.stderr


def piped(text: bytes) -> int:
    """A descriptor that a text can be read from, and then its end."""
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    return reading


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        (b"1\n2 \n\n", ""),
        (b"1\n2\n3\n", "the program printed 3 lines, not 2"),
        (b"1\n", "the program printed 1 lines, not 2"),
        (b"1\n3\n", "the program printed '3' in line 2, not '2'"),
        (b"3\n2\n1\n", "the program printed '3' in line 1, not '1'"),
    ],
)
def test_output_is_compared_line_by_line(printed: bytes, reason: str) -> None:
    fd = piped(printed)
    found = grader.compare_output(fd, "1\n2\n")
    os.close(fd)
    assert (found["held"], found["run"], found.get("reason", "")) == (int(not reason), 1, reason)


def test_of_much_output_the_middle_is_left_out_and_of_little_nothing() -> None:
    most = grader.MOST_TOLD
    between = "\n... (1,234 bytes are left out) ...\n"
    cases = {
        "few words": "few words",
        "a" * most + "b" * most: "a" * most + "b" * most,
        "a" * most + "-" * 1234 + "b" * most: "a" * most + between + "b" * most,
    }
    for printed, told in cases.items():
        fd = piped(printed.encode())
        assert grader.read_output(fd) == {"held": 1, "run": 1, "output": told}
        os.close(fd)


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset, str, bytes, dict])
def test_a_value_of_very_many_items_is_told_by_their_number(kind: Any) -> None:
    def of(count: int) -> Any:
        if kind is str:
            return "x" * count
        numbers = (number % 256 for number in range(count))
        return kind(numbers if kind in (bytes, list, tuple) else dict.fromkeys(range(count)))

    assert grader.shown(of(1001)) == f"{kind.__name__} of 1001 items"
    assert grader.shown(of(1000)) == repr(of(1000))[: grader.MOST_SHOWN] + "..."


def test_a_program_defines_what_it_names_wherever_that_stands() -> None:
    def defines(source: str) -> bool:
        tree = judged_process.parsed(source)
        assert tree is not None
        return judged_process.defines(tree, "add")

    assert defines("def add(a, b): return a + b")
    assert defines("class add: pass")
    assert defines("def outer():\n    def add(): pass")
    assert defines("add = sum") and defines("from operator import add")
    assert not defines("x = a + b")
    assert not defines("def other(): return add(1, 2)")


def test_the_grader_has_twice_the_processor_time_of_the_program() -> None:
    around = Confinement("/nowhere", Limits(cpu_s=1.5, memory_mb=64, disk_mb=8))
    made = unit.Unit(around, -1, -1, {"room": False})
    tests = made._for_tests()  # pyright: ignore
    assert tests.limits == Limits(cpu_s=3.0, memory_mb=64, disk_mb=8)
    assert tests.folder == "/nowhere" and around.limits.cpu_s == 1.5


def test_a_unit_that_nobody_sends_jobs_any_more_ends_well() -> None:
    sandbox = Sandbox("off", LIMITS)
    sandbox.start()
    process, control = sandbox._process, sandbox._socket  # pyright: ignore
    assert process is not None and control is not None
    control.shutdown(socket.SHUT_WR)
    assert process.wait(20) == 0
    sandbox.close()


def test_a_program_that_hangs_up_has_time_to_tell_how_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # More time than usual, so that no busy machine makes it too little.
    modules = dict(client.bundle.sources())
    name = "oxrl_sandbox.inside.unit"
    line = "LAST_WORDS_S = 0.2\n"
    assert line in modules[name]
    modules[name] = modules[name].replace(line, "LAST_WORDS_S = 20.0\n")
    monkeypatch.setattr(client.bundle, "sources", lambda: modules)
    hangs_up = (
        "import os, time\n"
        "def add(a, b):\n"
        "    os.closerange(3, 256)\n"
        "    time.sleep(0.3)\n"
        "    os._exit(7)\n"
    )
    sandbox = Sandbox("off", LIMITS)
    found = sandbox.judge(Job("calls", {"code": hangs_up}, {**ADD, "setup": ""}))
    sandbox.close()
    assert (found.held, found.reason) == (0, "the program ended with exit status 7")


def test_what_a_grader_tells_beside_its_verdict_is_passed_over() -> None:
    process = {"status": 0, "late": False, "starved": False, "full": False}
    ended = {"program": process, "tests": process, "answered": True, "waiting": False}
    graded = {"held": 1, "run": 2, "reason": "one failed", "seconds": 0.5, "starved": True}
    assert finding("calls", LIMITS, graded, ended) == Verdict(1, 2, "one failed")


def test_data_that_is_not_plain_does_not_pass() -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    for value in (object(), deep, lambda: 0):
        with pytest.raises(plain.NotPlain):
            plain.encode(value, plain.refuse)


def test_data_is_nested_200_deep_and_no_deeper() -> None:
    value: Any = "inside"
    for _ in range(200):
        value = [value]
    assert plain.decode(plain.encode(value, plain.refuse), plain.refuse) == value
    with pytest.raises(plain.NotPlain, match="nested more than 200 deep"):
        plain.encode([value], plain.refuse)


class _Service(BaseHTTPRequestHandler):
    """As much of SandboxFusion as is asked for; `answer` replaces what the program printed."""

    answer: str | None = None

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code" and request["language"] == "python"
        command = [sys.executable, "-c", request["code"]]
        done = subprocess.run(
            command, input=request["stdin"], capture_output=True, text=True, check=False
        )
        stdout = done.stdout if self.answer is None else self.answer
        result = {"status": "Finished", "return_code": done.returncode, "stdout": stdout}
        reply = {
            "status": "Success",
            "message": "",
            "run_result": {**result, "stderr": done.stderr},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@LINUX
def test_a_service_judges_programs_and_its_word_alone_is_no_verdict(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(code: str) -> tuple[float | None, str]:
        found = code_reward(code, ADD, sandbox="strict", url=service, program_s=2)
        return found.value, found.status

    assert score(RIGHT) == (1.0, "ok")
    assert score("def add(a, b): return 0") == (0.0, "ok")
    assert score("import os\nprint('ok')\nos._exit(0)") == (0.0, "ok")
    monkeypatch.setattr(_Service, "answer", "All tests passed")
    assert score(RIGHT) == (None, "error")


def test_a_service_may_take_longer_than_the_program_that_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program of 2 s of work and 3 s of waiting; then the unit's margin, the service's, ours."""
    asked: list[tuple[dict[str, Any], float]] = []

    def unanswered(request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        asked.append((request, limit_s))
        return {"message": "busy"}

    found = remote.RemoteSandbox("http://127.0.0.1:9", LIMITS)
    monkeypatch.setattr(found, "_post", unanswered)
    with pytest.raises(SandboxError, match="busy"):
        found.judge(Job("calls", {"code": RIGHT}, {**ADD, "setup": ""}))
    [(request, limit_s)] = asked
    unit_s = float(request["stdin"].split()[1])
    assert (unit_s, request["run_timeout"], limit_s) == (
        5 + remote.MARGIN_S,
        5 + 2 * remote.MARGIN_S,
        5 + 3 * remote.MARGIN_S,
    )


def test_a_service_that_is_not_there_is_an_error() -> None:
    found = code_reward(RIGHT, ADD, sandbox="strict", url="http://127.0.0.1:9")
    assert (found.value, found.status) == (None, "error")
    assert "127.0.0.1:9/run_code" in found.reason


def test_jobs_that_are_sent_while_nobody_reads_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MARGIN_S", 0.0)
    sandbox = Sandbox("off", Limits(cpu_s=0.1, memory_mb=256, disk_mb=8, wait_s=0.5))
    sandbox.start()
    process = sandbox._process
    assert process is not None
    process.send_signal(19)  # SIGSTOP
    job = Job("calls", {"code": "x" * (1 << 20)}, {"tests": ["assert x"], "setup": ""})
    with pytest.raises(SandboxError, match="did not answer in time"):
        sandbox.judge(job)
    sandbox.close()


def test_a_unit_that_waits_for_ever_costs_its_job_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "MARGIN_S", 0.2)
    sandbox = Sandbox("off", Limits(cpu_s=0.1, memory_mb=256, disk_mb=8, wait_s=0.5))
    sandbox.start()
    stuck = sandbox._process
    assert stuck is not None
    # As one that waits for a killed process which the kernel does not end: it says nothing more.
    stuck.send_signal(signal.SIGSTOP)
    job = Job("calls", {"code": RIGHT}, {**ADD, "setup": ""})
    began = time.monotonic()
    with pytest.raises(SandboxError, match="did not answer in time"):
        sandbox.judge(job)
    assert time.monotonic() - began < 5
    assert stuck.poll() == -signal.SIGKILL
    monkeypatch.setattr(client, "MARGIN_S", 10.0)
    assert sandbox.judge(job).held == 1
    sandbox.close()


@LINUX
def test_layers_are_told_by_name() -> None:
    found = layers.layers()
    assert set(found) == {"landlock", "seccomp", "namespaces", "bubblewrap"}
    assert found["landlock"] == kernel.landlock_version()
    assert confine.reachable_by_others("/")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_bubblewrap_makes_the_namespaces_where_the_unit_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = client.ways
    monkeypatch.setattr(client, "ways", lambda level: real(level)[1:])
    sandbox = Sandbox("strict", LIMITS)
    try:
        assert judged(sandbox, RIGHT, ADD, partial=False).value == 1.0
        assert sandbox.way == "bubblewrap"
        look = "import os\ndef add(a, b):\n    os.listdir('/')\n    return a + b\n"
        assert judged(sandbox, look, ADD, partial=False).value == 0.0
    finally:
        sandbox.close()
