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

# The numbers of system calls that are allowed.
# Source: asm/unistd_64.h and asm-generic/unistd.h of the Linux headers.
X86_64 = {
    "read": 0,
    "write": 1,
    "readv": 19,
    "writev": 20,
    "pread64": 17,
    "pwrite64": 18,
    "close": 3,
    "close_range": 436,
    "stat": 4,
    "fstat": 5,
    "lstat": 6,
    "newfstatat": 262,
    "statx": 332,
    "lseek": 8,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "mremap": 25,
    "madvise": 28,
    "brk": 12,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "rt_sigpending": 127,
    "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130,
    "sigaltstack": 131,
    "access": 21,
    "faccessat": 269,
    "faccessat2": 439,
    "pipe": 22,
    "pipe2": 293,
    "select": 23,
    "pselect6": 270,
    "poll": 7,
    "ppoll": 271,
    "epoll_create": 213,
    "epoll_create1": 291,
    "epoll_ctl": 233,
    "epoll_wait": 232,
    "epoll_pwait": 281,
    "eventfd2": 290,
    "sched_yield": 24,
    "dup": 32,
    "dup2": 33,
    "dup3": 292,
    "nanosleep": 35,
    "clock_nanosleep": 230,
    "pause": 34,
    "getpid": 39,
    "getppid": 110,
    "gettid": 186,
    "exit": 60,
    "exit_group": 231,
    "futex": 202,
    "set_robust_list": 273,
    "get_robust_list": 274,
    "rseq": 334,
    "restart_syscall": 219,
    "getcwd": 79,
    "chdir": 80,
    "fchdir": 81,
    "rename": 82,
    "renameat": 264,
    "renameat2": 316,
    "mkdir": 83,
    "mkdirat": 258,
    "rmdir": 84,
    "unlink": 87,
    "unlinkat": 263,
    "symlink": 88,
    "symlinkat": 266,
    "readlink": 89,
    "readlinkat": 267,
    "getdents64": 217,
    "fsync": 74,
    "fdatasync": 75,
    "ftruncate": 77,
    "umask": 95,
    "getuid": 102,
    "geteuid": 107,
    "getgid": 104,
    "getegid": 108,
    "getresuid": 118,
    "getresgid": 120,
    "getgroups": 115,
    "getpgrp": 111,
    "getpgid": 121,
    "getsid": 124,
    "uname": 63,
    "sysinfo": 99,
    "times": 100,
    "getrusage": 98,
    "clock_gettime": 228,
    "clock_getres": 229,
    "gettimeofday": 96,
    "time": 201,
    "getrandom": 318,
    "getrlimit": 97,
    "setrlimit": 160,
    "sched_getaffinity": 204,
    "sched_getparam": 143,
    "sched_getscheduler": 145,
    "sched_get_priority_max": 146,
    "sched_get_priority_min": 147,
    "getpriority": 140,
    "set_tid_address": 218,
    "arch_prctl": 158,
    "getitimer": 36,
    "setitimer": 38,
    "alarm": 37,
    "wait4": 61,
    "waitid": 247,
    "sendfile": 40,
    "copy_file_range": 326,
    "fadvise64": 221,
    "recvfrom": 45,
    "shutdown": 48,
    "getsockname": 51,
    "getpeername": 52,
    "getsockopt": 55,
    "setsockopt": 54,
    "fstatfs": 138,
    "statfs": 137,
    "membarrier": 324,
    "mincore": 27,
    "capget": 125,
}
AARCH64 = {
    "read": 63,
    "write": 64,
    "readv": 65,
    "writev": 66,
    "pread64": 67,
    "pwrite64": 68,
    "close": 57,
    "close_range": 436,
    "fstat": 80,
    "newfstatat": 79,
    "statx": 291,
    "lseek": 62,
    "mmap": 222,
    "mprotect": 226,
    "munmap": 215,
    "mremap": 216,
    "madvise": 233,
    "brk": 214,
    "rt_sigaction": 134,
    "rt_sigprocmask": 135,
    "rt_sigreturn": 139,
    "rt_sigpending": 136,
    "rt_sigtimedwait": 137,
    "rt_sigsuspend": 133,
    "sigaltstack": 132,
    "faccessat": 48,
    "faccessat2": 439,
    "pipe2": 59,
    "pselect6": 72,
    "ppoll": 73,
    "epoll_create1": 20,
    "epoll_ctl": 21,
    "epoll_pwait": 22,
    "eventfd2": 19,
    "sched_yield": 124,
    "dup": 23,
    "dup3": 24,
    "nanosleep": 101,
    "clock_nanosleep": 115,
    "getpid": 172,
    "getppid": 173,
    "gettid": 178,
    "exit": 93,
    "exit_group": 94,
    "futex": 98,
    "set_robust_list": 99,
    "get_robust_list": 100,
    "rseq": 293,
    "restart_syscall": 128,
    "getcwd": 17,
    "chdir": 49,
    "fchdir": 50,
    "renameat": 38,
    "renameat2": 276,
    "mkdirat": 34,
    "unlinkat": 35,
    "symlinkat": 36,
    "readlinkat": 78,
    "getdents64": 61,
    "fsync": 82,
    "fdatasync": 83,
    "ftruncate": 46,
    "umask": 166,
    "getuid": 174,
    "geteuid": 175,
    "getgid": 176,
    "getegid": 177,
    "getresuid": 148,
    "getresgid": 150,
    "getgroups": 158,
    "getpgid": 155,
    "getsid": 156,
    "uname": 160,
    "sysinfo": 179,
    "times": 153,
    "getrusage": 165,
    "clock_gettime": 113,
    "clock_getres": 114,
    "gettimeofday": 169,
    "getrandom": 278,
    "getrlimit": 163,
    "setrlimit": 164,
    "sched_getaffinity": 123,
    "sched_getparam": 121,
    "sched_getscheduler": 120,
    "sched_get_priority_max": 125,
    "sched_get_priority_min": 126,
    "getpriority": 141,
    "set_tid_address": 96,
    "getitimer": 102,
    "setitimer": 103,
    "wait4": 260,
    "waitid": 95,
    "sendfile": 71,
    "copy_file_range": 285,
    "fadvise64": 223,
    "recvfrom": 207,
    "shutdown": 210,
    "getsockname": 204,
    "getpeername": 205,
    "getsockopt": 209,
    "setsockopt": 208,
    "fstatfs": 44,
    "statfs": 43,
    "membarrier": 283,
    "mincore": 232,
    "capget": 90,
}
ALLOWED = {"x86_64": X86_64, "aarch64": AARCH64}
# Those of calls that are judged by their arguments below.
JUDGED = {
    "x86_64": {
        "open": 2,
        "openat": 257,
        "clone": 56,
        "clone3": 435,
        "kill": 62,
        "tgkill": 234,
        "prlimit": 302,
        "ioctl": 16,
        "socketpair": 53,
        "sendto": 44,
        "prctl": 157,
        "fcntl": 72,
    },
    "aarch64": {
        "openat": 56,
        "clone": 220,
        "clone3": 435,
        "kill": 129,
        "tgkill": 131,
        "prlimit": 261,
        "ioctl": 29,
        "socketpair": 199,
        "sendto": 206,
        "prctl": 167,
        "fcntl": 25,
    },
}

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
    judged = {
        "open": _none_of(1, _EMPTIED, _HOW_OPENED),
        "openat": _none_of(2, _EMPTIED, _HOW_OPENED),
        "clone": _threads_only(),
        # glibc then starts its threads by clone, whose flags can be read.
        "clone3": _fail(errno.ENOSYS),
        "kill": _one_of(0, (pid,)),
        "tgkill": _one_of(0, (pid,)),
        "prlimit": _one_of(0, (0, pid)),
        "ioctl": _one_of(1, _IOCTLS),
        "socketpair": _one_of(0, (_AF_UNIX,)),
        "sendto": _no_address(),
        "prctl": _one_of(0, _NAME_OF_THREAD),
        "fcntl": _none_of(1, _FCNTLS),
    }
    code = _load(_ARCHITECTURE)
    code += _step(0x15, 1, 0, ARCHITECTURES[machine]) + _return(_KILL_PROCESS)
    code += _load(_NUMBER)
    if machine == "x86_64":
        code += _step(0x35, 0, 1, _X32) + _return(_KILL_PROCESS)
    for number in ALLOWED[machine].values():
        code += _if_equal(number, _return(_ALLOW))
    for name, number in JUDGED[machine].items():
        code += _if_equal(number, judged[name])
    return code + _fail()
