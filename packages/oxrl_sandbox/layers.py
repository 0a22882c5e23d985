"""The layers of the sandbox that this machine offers, and remedies for missing ones."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

from oxrl_sandbox.client import LEVELS, Level, Sandbox, environment, interpreter
from oxrl_sandbox.findings import SandboxError
from oxrl_sandbox.inside import filters, kernel
from oxrl_sandbox.inside.confine import Limits

TRIAL = Limits(cpu_s=2.0, memory_mb=256, disk_mb=4)
_NAMESPACES = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
failed = libc.unshare({flags})
sys.stdout.write(os.strerror(ctypes.get_errno()) if failed else "yes")
"""
FIXES = {
    "strict": (
        "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces=15000; in a "
        "container --security-opt seccomp=unconfined or --privileged); or install bubblewrap; or "
        "write reward.sandbox=basic, which does without namespaces; or reward.sandbox_url of a "
        "SandboxFusion service"
    ),
    "basic": (
        "a Linux kernel from 5.13 on with Landlock and seccomp (boot with lsm=landlock,...); or "
        "reward.sandbox_url of a SandboxFusion service; or reward.sandbox=off where nothing that "
        "the model may write can do harm"
    ),
    "off": "a Python that can start itself",
}


def layers() -> dict[str, object]:
    """The layers by name: a version, a path, yes or no, or why not."""
    machine = kernel.machine()
    return {
        "landlock": kernel.landlock_version(),
        "seccomp": machine in filters.ARCHITECTURES
        and os.path.exists("/proc/sys/kernel/seccomp/actions_avail"),
        "namespaces": _namespaces() if machine else "no Linux",
        "bubblewrap": shutil.which("bwrap"),
    }


def _namespaces() -> str:
    """Try to make namespaces: "yes", or what the kernel says against it."""
    flags = kernel.NEW_USERS | kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_NETWORK
    command = [interpreter(), "-P", "-S", "-c", _NAMESPACES.format(flags=flags)]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, env=environment(), check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def examine() -> Iterator[tuple[str, str, str, str]]:
    """Try the levels at which programs of the model can be judged, for `oxrl doctor`.

    Yields:
        "ok" or "warn", the subject, a text, and how to mend it.
    """
    told = [f"{name}: {value}" for name, value in layers().items()]
    yield "ok", "sandbox layers", "; ".join(told), ""
    for level in LEVELS[:2]:
        why = why_not(level)
        text = f"works (reward.name=code reward.sandbox={level})"
        if why:
            text = f"cannot be had, so reward.name=code is refused with it: {why}"
        yield "warn" if why else "ok", f"sandbox {level}", text, FIXES[level] if why else ""


def why_not(level: Level) -> str:
    """Try a level on this machine, and say why it cannot be had; empty if it can.

    Args:
        level: "strict", "basic" or "off".
    """
    sandbox = Sandbox(level, TRIAL)
    try:
        sandbox.start()
    except SandboxError as error:
        return str(error)
    finally:
        sandbox.close()
    return ""
