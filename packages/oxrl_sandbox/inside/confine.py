"""Confinement of one process, in layers that hold for the rest of its life."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oxrl.usercode import descendants
from oxrl_sandbox.inside import filters, kernel

# Shared libraries, the standard library and its data. No third-party packages.
SYSTEM_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
NOBODY = 65534
# Descriptors that judged code may have, and threads: alone in its namespaces, and where the kernel
# counts others of the same user too.
MOST_FILES = 64
MOST_THREADS = 64
MOST_THREADS_OF_USER = 1024
WAIT_S = 3.0


@dataclass(frozen=True)
class Limits:
    """The limits of what judged code may use.

    cpu_s: seconds of processor time of each process.
    wait_s: seconds that it may sleep, or wait for a processor, beside what it works.
    memory_mb: address space on top of the interpreter's. disk_mb: of its folder, and of each file.
    """

    cpu_s: float
    memory_mb: int
    disk_mb: int
    wait_s: float = WAIT_S

    @property
    def wall_s(self) -> float:
        """Seconds in which a process has to end."""
        return self.cpu_s + self.wait_s


@dataclass(frozen=True)
class Confinement:
    """The layers that are put around a process.

    folder: the only place that it may write to.
    filtered: system calls are filtered; else only the limits hold.
    rules: of Landlock, beside that; None: without.
    user: it becomes this user; None: it stays who it is. may_read_all: see `kernel.become`.
    threads: that its user may have, in these namespaces.
    """

    folder: str
    limits: Limits
    rules: int | None = None
    filtered: bool = False
    user: int | None = None
    may_read_all: bool = False
    threads: int = MOST_THREADS


def readable_paths() -> list[str]:
    """List the paths that judged code may read: enough for the standard library."""
    library = os.path.dirname(os.path.realpath(os.__file__))
    own = os.path.join(os.path.realpath(sys.base_prefix), "lib")
    return [library, own, *SYSTEM_FOLDERS, *SYSTEM_FILES, *DEVICES]


def reachable_by_others(path: str) -> bool:
    """True if an ordinary user could open a folder: every folder on the way lets others pass.

    Args:
        path: of the folder; links are followed.

    Raises:
        OSError: a folder on the way cannot be looked at.
    """
    real = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in (real, *real.parents))


def close_others(kept: Sequence[int]) -> None:
    """Close every descriptor but the standard ones and some.

    Args:
        kept: descriptors from 3 on, in any order.
    """
    start = 3
    for fd in sorted(kept):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX") if sys.platform != "linux" else 4096)


def confine(around: Confinement, kept: Sequence[int], base_bytes: int) -> None:
    """Confine this process, which has just been forked.

    Args:
        around: the layers.
        kept: descriptors that it keeps, beside 0, 1 and 2.
        base_bytes: address space that it has already.

    Raises:
        OSError: a layer cannot be had; nothing may be run then.
    """
    os.setsid()
    if sys.platform == "linux":
        descendants.die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    close_others(kept if around.rules is None else [*kept, around.rules])
    os.dup2(0, 2)  # nothing: what it prints there is nobody's
    os.chdir(around.folder)
    os.environ.clear()
    os.environ.update(
        HOME=around.folder, TMPDIR=around.folder, LANG="C.UTF-8", PATH="/usr/bin:/bin"
    )
    set_limits(around.limits, around.threads, base_bytes)
    if not around.filtered:
        return
    if around.user is not None:
        kernel.become(around.user, may_read_all=around.may_read_all)
    else:
        kernel.set_capabilities(0)
    kernel.forbid_new_privileges()
    if around.rules is not None:
        kernel.landlock_restrict(around.rules)
        os.close(around.rules)
    kernel.install_filter(filters.program(kernel.machine(), os.getpid()))


def set_limits(limits: Limits, threads: int, base_bytes: int) -> None:
    """Apply what the kernel counts by process; limits are never raised above those there are.

    Args:
        limits: seconds are rounded up to whole ones, megabytes are 2**20 bytes.
        threads: that the process's user may have at a time.
        base_bytes: address space that the process has already, on top of which its memory counts.

    Raises:
        OSError, ValueError: the kernel refuses one.
    """
    seconds = max(1, int(limits.cpu_s + 0.999))
    wanted = [
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, limits.disk_mb << 20),
        (resource.RLIMIT_NOFILE, MOST_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, threads),
    ]
    if sys.platform == "linux":  # elsewhere the address space cannot be limited
        wanted.append((resource.RLIMIT_AS, base_bytes + (limits.memory_mb << 20)))
    for what, most in wanted:
        _, hard = resource.getrlimit(what)
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (lowest, lowest))
