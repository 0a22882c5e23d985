"""The surroundings of a run: enough to explain later why two runs differ, and no secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from oxrl.redact import HIDDEN, SECRET_NAME, masked
from oxrl.runs.files import Json

# Packages that decide results.
PACKAGES = (
    "oxrl",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "math-verify",
    "mlflow",
    "pyarrow",
    "reasoning-gym",
    "deepspeed",
    "vllm",
    "ray",
    "peft",
    "trl",
)
MOST_DIFF = 1_000_000  # characters
# Only variables that change what is computed, and whose values are no secret.
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONHASHSEED",
    "HF_HUB_OFFLINE",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def environment() -> Json:
    """Describe versions, hardware, git state and command line of this process, as JSON."""
    # What a container may use, where the system can tell: fewer than the machine has.
    cpus = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    folders = filter(os.path.isdir, sys.path)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpus": cpus,
        "packages": versions(*map(os.path.getmtime, folders)),
        "torch": torch_state(),
        "git": git_state(Path(__file__).resolve().parent),
        "command": command_line(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


@cache
def versions(*changed: float) -> dict[str, str]:
    """Return the version of each package that a run may depend on, where it is installed.

    Args:
        changed: when the folders of packages did: what is found stays true until then.
    """
    found: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def torch_state() -> Json | None:
    """Describe threads and devices of torch; None if it was not imported, which takes seconds."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    gpus = range(torch.cuda.device_count())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "accelerator": None if accelerator is None else accelerator.type,
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
    }


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10)


def git_state(directory: Path) -> Json | None:
    """Return the commit of the repository around `directory`, and whether files differ from it.

    Returns:
        None outside of git.
    """
    try:
        said = _git(directory, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return None
    commit, dirty, _ = said.strip().partition("-dirty")
    return {"commit": commit, "dirty": bool(dirty)}


def git_diff(directory: Path) -> str:
    """Return the diff of the repository around `directory` against its commit, masked.

    Returns:
        Where it cannot be had, or is longer than MOST_DIFF, a line that says so.
    """
    try:
        said = _git(directory, "diff", "--no-ext-diff", "--no-color", "HEAD")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        return f"not recorded: git diff ended with {type(error).__name__}\n"
    if len(said) > MOST_DIFF:
        return f"not recorded: {len(said):,} characters, at most {MOST_DIFF:,} are kept\n"
    return masked(said)


def command_line(extra: Sequence[str] = ()) -> str:
    """Return the command line of this program, ready for a shell and without secrets.

    Args:
        extra: arguments to add where they are not there yet.
    """
    program, *arguments = sys.argv
    path = Path(program)
    if path.name == "__main__.py":
        start = ["python", "-m", path.parent.name]
    elif path.suffix == ".py":
        start = ["python", program]
    else:
        start = [path.name]
    arguments += [argument for argument in extra if argument not in arguments]
    return shlex.join(start + [without_secret(argument) for argument in arguments])


def without_secret(argument: str) -> str:
    """Mask an argument of a command line: the value goes where its name is that of a secret."""
    name, equals, _ = argument.partition("=")
    if equals and SECRET_NAME.fullmatch(name):
        return f"{name}={HIDDEN}"
    return masked(argument)
