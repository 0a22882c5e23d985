"""A room of its own: namespaces with no network, no other process and a file system of a few
read-only folders.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from oxrl.usercode import descendants
from oxrl_sandbox.inside import confine, kernel

ROOM = (
    kernel.NEW_USERS
    | kernel.NEW_MOUNTS
    | kernel.NEW_PIDS
    | kernel.NEW_NETWORK
    | kernel.NEW_IPC
    | kernel.NEW_HOST_NAME
)
FOLDER = "/job"
# The user inside who set the room up, where two can be mapped.
ROOT = 0


def in_room(live: Callable[[int | None], int], mount_point: str, disk_mb: int) -> int:
    """Go on in new namespaces, as their first process.

    Args:
        live: called there; gets the user that judged code becomes, None: it stays who it is.
        mount_point: any folder; what it holds is not changed.
        disk_mb: size of the folder that judged code may write to.

    Returns:
        Its exit status. This process waits for it, and takes it along when it dies.

    Raises:
        OSError: the kernel or the container does not allow it.
    """
    two_users = _map_users()
    child = os.fork()
    if child:
        # As long as it lives; it is whoever started this process that ends both, by a limit.
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) & 0xFF
    descendants.die_with_parent()
    try:
        _furnish(mount_point, disk_mb)
    except OSError as error:
        sys.stderr.write(f"the file system of the sandbox: {error}\n")
        os._exit(1)
    os._exit(live(confine.NOBODY if two_users else None))


def _shown() -> list[str]:
    """The paths to show, none of them inside another."""
    paths: list[str] = []
    for path in sorted(set(confine.readable_paths())):
        inside = any(path.startswith(f"{shown}/") for shown in paths if not os.path.islink(shown))
        if os.path.exists(path) and not inside:
            paths.append(path)
    return paths


def _map_users() -> bool:
    """Enter the namespaces; who this is outside becomes root inside, and of root's own users one
    without rights becomes available.

    Returns:
        Whether there is that second user.
    """
    user = os.getuid()
    group = os.getgid()
    if user == 0 and _helped():
        return True
    if user != 0:
        kernel.unshare(ROOM)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{confine.NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{confine.NOBODY} {group} 1")
    return False


def _helped() -> bool:
    """Enter as root, with a helper outside who maps two users; nobody inside may."""
    pid = os.getpid()
    ready, go = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(go)
        os.read(ready, 1)
        try:
            for kind in ("uid", "gid"):
                lines = f"{ROOT} 0 1\n{confine.NOBODY} {confine.NOBODY} 1\n"
                Path(f"/proc/{pid}/{kind}_map").write_text(lines)
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(ready)
    kernel.unshare(ROOM)
    os.write(go, b"\n")
    os.close(go)
    _, status = os.waitpid(helper, 0)
    return status == 0


def _furnish(mount_point: str, disk_mb: int) -> None:
    """Build the file system out of the paths to show, and forget every other."""
    kernel.mount_private()
    paths = _shown()
    # Held before the mount, which may cover them.
    links = {path: os.readlink(path) for path in paths if os.path.islink(path)}
    held = {path: kernel.held(path) for path in paths}
    kernel.mount_memory(mount_point, megabytes=1, mode="755")
    for path, fd in held.items():
        target = mount_point + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if path in links:
            os.symlink(links[path], target)
            continue
        source = f"/proc/self/fd/{fd}"
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT, 0o644))
        kernel.mount_read_only(source, target, device=path in confine.DEVICES)
        os.close(fd)
    os.mkdir(mount_point + FOLDER)
    kernel.enter_root(mount_point)
    os.chmod("/", 0o555)
    kernel.mount_memory(FOLDER, megabytes=disk_mb, mode="777")


def fresh_folder(disk_mb: int) -> None:
    """Replace the folder that judged code wrote to, FOLDER, by an empty one.

    Args:
        disk_mb: it holds, of 2**20 bytes.

    Raises:
        OSError: the kernel refuses.
    """
    kernel.unmount(FOLDER)
    kernel.mount_memory(FOLDER, megabytes=disk_mb, mode="777")
