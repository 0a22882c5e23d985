"""The system calls that judged code may make; all others fail.

Nothing on it starts a process, a program or a connection, or acts on another process. Nothing
changes the mode, the times, the owner or the attributes of a file either, or locks one: those calls
reach every file of the user that Landlock keeps from being opened. A call that is not on the list
returns EPERM, so that a program sees an ordinary OSError.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable

# Numbers on x86_64 and on aarch64; None: the call does not exist there.
# Source: asm/unistd_64.h and asm-generic/unistd.h of the Linux headers.
ALLOWED: dict[str, tuple[int, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "close": (3, 57),
    "close_range": (436, 436),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "select": (23, None),
    "pselect6": (270, 72),
    "poll": (7, None),
    "ppoll": (271, 73),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "sched_yield": (24, 124),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "pause": (34, None),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "rseq": (334, 293),
    "restart_syscall": (219, 128),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "ftruncate": (77, 46),
    "umask": (95, 166),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getrusage": (98, 165),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "getpriority": (140, 141),
    "set_tid_address": (218, 96),
    "arch_prctl": (158, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, None),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "fadvise64": (221, 223),
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
    "setsockopt": (54, 208),
    "fstatfs": (138, 44),
    "statfs": (137, 43),
    "membarrier": (324, 283),
    "mincore": (27, 232),
    "capget": (125, 90),
}
# Judged by their arguments below.
OPEN = (2, None)
OPENAT = (257, 56)
CLONE = (56, 220)
CLONE3 = (435, 435)
KILL = (62, 129)
TGKILL = (234, 131)
PRLIMIT = (302, 261)
IOCTL = (16, 29)
SOCKETPAIR = (53, 199)
SENDTO = (44, 206)
PRCTL = (157, 167)
FCNTL = (72, 25)

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1
# Terminal size and kind, close on exec, non-blocking: what `open` and `subprocess` ask of a file.
_IOCTLS = (0x5401, 0x5413, 0x5421, 0x5450, 0x5451)
# F_SETOWN, F_SETSIG, F_SETOWN_EX: they make the kernel send signals to others. F_SETLEASE: it holds
# up others who open the file.
_FCNTLS = (8, 10, 15, 1024)
# O_TRUNC and both bits of how a file is opened. Opened in the fourth way, which no rule of Landlock
# covers, any file can be locked; and emptied, as one opened for reading can, before Linux 6.2.
_HOW_OPENED = 0x203
_EMPTIED = (0x200, 3, 0x203)
_NAME_OF_THREAD = (15, 16)

_KILL_PROCESS = 0x80000000
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000
# Where the kernel puts what a filter reads.
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16


def _step(code: int, yes: int, no: int, value: int) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _load(place: int) -> bytes:
    return _step(0x20, 0, 0, place)


def _argument(index: int, *, high: bool = False) -> bytes:
    return _load(_ARGUMENTS + 8 * index + 4 * high)


def _return(value: int) -> bytes:
    return _step(0x06, 0, 0, value)


def _fail(number: int = errno.EPERM) -> bytes:
    return _return(_FAIL | number)


def _if_equal(value: int, then: bytes) -> bytes:
    """`then` where what was loaded is `value`, else what follows."""
    return _step(0x15, 0, len(then) // 8, value) + then


def _one_of(index: int, values: Iterable[int]) -> bytes:
    """Allow where an argument is one of some values."""
    tests = [_if_equal(value, _return(_ALLOW)) for value in values]
    return _argument(index) + b"".join(tests) + _fail()


def _none_of(index: int, values: Iterable[int], bits: int = 0xFFFFFFFF) -> bytes:
    """Allow where some bits of an argument are none of some values."""
    tests = [_if_equal(value, _fail()) for value in values]
    return _argument(index) + _step(0x54, 0, 0, bits) + b"".join(tests) + _return(_ALLOW)


def _no_address() -> bytes:
    """Allow to send only where the call names no receiver: to the other end of a pair."""
    low = _if_equal(0, _argument(4, high=True) + _if_equal(0, _return(_ALLOW)))
    return _argument(4) + low + _fail()


def _threads_only() -> bytes:
    """Allow to start a thread, and no process."""
    has_flag = _step(0x45, 0, 1, _CLONE_THREAD)
    return _argument(0) + has_flag + _return(_ALLOW) + _fail()


def program(machine: str, pid: int) -> bytes:
    """The filter for one process.

    Args:
        machine: processor family, a key of ARCHITECTURES.
        pid: of that process, the only one that it may send signals to.

    Returns:
        What `kernel.install_filter` takes.
    """
    column = list(ARCHITECTURES).index(machine)
    calls = (
        *((numbers, _return(_ALLOW)) for numbers in ALLOWED.values()),
        (OPEN, _none_of(1, _EMPTIED, _HOW_OPENED)),
        (OPENAT, _none_of(2, _EMPTIED, _HOW_OPENED)),
        (CLONE, _threads_only()),
        # glibc then starts its threads by clone, whose flags can be read.
        (CLONE3, _fail(errno.ENOSYS)),
        (KILL, _one_of(0, (pid,))),
        (TGKILL, _one_of(0, (pid,))),
        (PRLIMIT, _one_of(0, (0, pid))),
        (IOCTL, _one_of(1, _IOCTLS)),
        (SOCKETPAIR, _one_of(0, (_AF_UNIX,))),
        (SENDTO, _no_address()),
        (PRCTL, _one_of(0, _NAME_OF_THREAD)),
        (FCNTL, _none_of(1, _FCNTLS)),
    )
    code = _load(_ARCHITECTURE)
    code += _step(0x15, 1, 0, ARCHITECTURES[machine]) + _return(_KILL_PROCESS)
    code += _load(_NUMBER)
    if machine == "x86_64":
        code += _step(0x35, 0, 1, _X32) + _return(_KILL_PROCESS)
    for numbers, then in calls:
        number = numbers[column]
        if number is not None:
            code += _if_equal(number, then)
    return code + _fail()
