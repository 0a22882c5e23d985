"""The calls to the Linux kernel that confinement needs and Python does not offer.

Source: the man pages landlock(7), seccomp(2), user_namespaces(7), pivot_root(2), capabilities(7).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Sequence

LIBC = ctypes.CDLL(None, use_errno=True)
# System calls without a function in every libc, which have one number everywhere.
MOUNT_SETATTR = 442
LANDLOCK_CREATE = 444
LANDLOCK_ADD = 445
LANDLOCK_RESTRICT = 446

NEW_MOUNTS = 0x00020000
NEW_HOST_NAME = 0x04000000
NEW_IPC = 0x08000000
NEW_USERS = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

_SET_DUMPABLE = 4
_KEEP_CAPABILITIES = 8
_SET_FILTER = 22
_DROP_BOUND = 24
_NO_NEW_PRIVILEGES = 38
_FILTER_MODE = 2
_READ_SEARCH = 1 << 2

_READ_ONLY = 1
_NO_SET_UID = 2
_NO_DEVICES = 4
_BIND = 4096
_RECURSIVE = 16384
_PRIVATE = 1 << 18
_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000


def machine() -> str:
    """The processor family, as the kernel calls it; empty where this is no Linux."""
    return os.uname().machine if sys.platform == "linux" else ""


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(number: int, what: str, *arguments: object) -> int:
    return _checked(LIBC.syscall(ctypes.c_long(number), *arguments), what)


def _control(what: str, *arguments: int) -> None:
    rest = [0] * (5 - len(arguments))
    _checked(LIBC.prctl(*map(ctypes.c_ulong, (*arguments, *rest))), what)


def _packed(layout: str, *values: int) -> ctypes.Array[ctypes.c_char]:
    """A structure in memory, laid out as `struct` has it."""
    return ctypes.create_string_buffer(struct.pack(layout, *values))


def hide_memory() -> None:
    """Keep processes of the same user from reading this one through ptrace or /proc."""
    _control("hide memory", _SET_DUMPABLE, 0)


def forbid_new_privileges() -> None:
    """Keep programs that are started from here on from gaining rights from their files."""
    _control("forbid new privileges", _NO_NEW_PRIVILEGES, 1)


def drop_bounding_set() -> None:
    """Let no program that is started from here on have a privilege, whatever its file says."""
    for capability in range(64):
        if LIBC.prctl(_DROP_BOUND, ctypes.c_ulong(capability), 0, 0, 0):
            break  # there are no more, or this user has none to give up


def become(user: int, *, may_read_all: bool) -> None:
    """Become an ordinary user, for good.

    Args:
        user: and group of the same number.
        may_read_all: keep the right to pass folders that are closed to that user; what may be read
            is then up to Landlock alone.
    """
    _control("keep capabilities", _KEEP_CAPABILITIES, int(may_read_all))
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    set_capabilities(_READ_SEARCH if may_read_all else 0)


def set_capabilities(kept: int) -> None:
    """Give up every privilege of root but some, for good.

    Args:
        kept: bits of the capabilities to keep; 0: none.

    Raises:
        OSError: the kernel refuses.
    """
    header = _packed("Ii", 0x20080522, 0)
    sets = _packed("6I", kept, kept, 0, 0, 0, 0)
    _checked(LIBC.capset(header, sets), "drop capabilities")


def install_filter(program: bytes) -> None:
    """Apply a seccomp filter to this process, for good; `forbid_new_privileges` comes first.

    Args:
        program: BPF instructions of 8 bytes each.

    Raises:
        OSError: the kernel refuses.
    """
    code = ctypes.create_string_buffer(program)
    held = _packed("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _control("seccomp", _SET_FILTER, _FILTER_MODE, ctypes.addressof(held))


def landlock_version() -> int:
    """The kernel's Landlock ABI; 0 where there is none."""
    if not machine():
        return 0
    return max(0, LIBC.syscall(ctypes.c_long(LANDLOCK_CREATE), None, ctypes.c_long(0), 1))


def landlock_rules(readable: Sequence[str], writable: Sequence[str]) -> int:
    """Make a set of rules that allows nothing but reading and writing below some paths.

    TCP is denied from ABI 4 on, signals and abstract sockets to others from ABI 6 on.

    Args:
        readable: files and folders; missing ones are left out.
        writable: the same.

    Returns:
        A file descriptor for `landlock_restrict`.

    Raises:
        OSError: Landlock is missing or switched off.
    """
    version = landlock_version()
    # Every right on files that this ABI knows, as bits.
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network = 3 if version >= 4 else 0
    scopes = 3 if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = _packed("QQQ", everything, network, scopes)
    rules = _call(LANDLOCK_CREATE, "landlock", attributes, ctypes.c_long(size), 0)
    read = 4 | 8  # the contents of files, and of folders
    of_files = 1 | 2 | 4 | 1 << 14 | 1 << 15
    for paths, rights in ((readable, read), (writable, everything & ~1)):
        for path in paths:
            if not os.path.exists(path):
                continue
            place = held(path)
            allowed = rights if os.path.isdir(path) else rights & of_files
            rule = _packed("=Qi", allowed & everything, place)
            _call(LANDLOCK_ADD, f"landlock: {path}", rules, 1, rule, 0)
            os.close(place)
    return rules


def held(path: str) -> int:
    """Hold a file or folder open without reading it.

    Args:
        path: where it is; a link is followed.

    Returns:
        A descriptor, to be closed by the caller.
    """
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def landlock_restrict(rules: int) -> None:
    """Apply a set of rules to this process, for good; `forbid_new_privileges` comes first.

    Args:
        rules: descriptor, as `landlock_rules` returns it.

    Raises:
        OSError: the kernel refuses.
    """
    _call(LANDLOCK_RESTRICT, "landlock", rules, 0)


def unshare(flags: int) -> None:
    """Move this process into new namespaces.

    Args:
        flags: NEW_... of this file, joined by `|`. With NEW_PIDS only children begun later are in
            the new one.

    Raises:
        OSError: the kernel refuses.
    """
    _checked(LIBC.unshare(flags), "new namespaces")


def mount_memory(target: str, *, megabytes: int, mode: str) -> None:
    """Mount an empty file system in memory that holds so much.

    Args:
        target: path of a folder.
        megabytes: it holds, of 2**20 bytes; 4096 files at most.
        mode: of the new root, octal digits such as "777".

    Raises:
        OSError: the kernel refuses.
    """
    options = f"size={megabytes}m,nr_inodes=4096,mode={mode}".encode()
    flags = ctypes.c_ulong(_NO_SET_UID | _NO_DEVICES)
    result = LIBC.mount(b"tmpfs", target.encode(), b"tmpfs", flags, options)
    _checked(result, f"mount tmpfs at {target}")


def mount_private() -> None:
    """Keep what this process mounts from being seen by others."""
    flags = ctypes.c_ulong(_PRIVATE | _RECURSIVE)
    _checked(LIBC.mount(None, b"/", None, flags, None), "private mounts")


def mount_read_only(source: str, target: str, *, device: bool = False) -> None:
    """Show a file or folder at another place, for reading; a device stays one.

    Args:
        source: path of the file or folder.
        target: path of another of its kind, which it hides.
        device: it is a device, which may be written to as before.

    Raises:
        OSError: the kernel refuses.
    """
    flags = ctypes.c_ulong(_BIND | _RECURSIVE)
    result = LIBC.mount(source.encode(), target.encode(), None, flags, None)
    _checked(result, f"bind {target}")
    if device:
        return
    attributes = _packed("QQQQ", _READ_ONLY | _NO_SET_UID | _NO_DEVICES, 0, 0, 0)
    _call(
        MOUNT_SETATTR,
        f"read-only {target}",
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE,
        attributes,
        ctypes.c_long(32),
    )


def unmount(target: str) -> None:
    """Take a file system away, even while it is used.

    Args:
        target: path where it is mounted.

    Raises:
        OSError: nothing is mounted there.
    """
    _checked(LIBC.umount2(target.encode(), _DETACH), f"unmount {target}")


def enter_root(root: str) -> None:
    """Make `root` the whole file system, and forget the old one.

    Args:
        root: path of a folder on which a file system is mounted; this process is in it afterwards.

    Raises:
        OSError: the kernel refuses.
    """
    os.chdir(root)
    _checked(LIBC.pivot_root(b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")
