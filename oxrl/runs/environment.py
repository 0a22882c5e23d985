"""What a run ran on: enough to explain later why two runs differ, and no secret."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Packages that decide results.
PACKAGES = (
    "oxrl torch transformers tokenizers safetensors numpy pydantic math-verify mlflow pyarrow reasoning-gym deepspeed "
    "vllm ray peft trl"
).split()
# Only variables that change what is computed, and whose values are no secret.
VARIABLES = (
    "OMP_NUM_THREADS MKL_NUM_THREADS CUDA_VISIBLE_DEVICES CUBLAS_WORKSPACE_CONFIG PYTHONHASHSEED HF_HUB_OFFLINE "
    "NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
).split()
SECRET = re.compile(
    r"^(.*(?:^|[._-])(?:key|token|secret|password|passwd|credentials?))=.+$",
    re.IGNORECASE | re.DOTALL,
)


def environment() -> dict[str, Any]:
    """Versions, hardware, git state and command line of this process, as JSON values."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    torch_facts: dict[str, Any] | None = None
    if (torch := sys.modules.get("torch")) is not None:  # never imported for this: it takes seconds
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        torch_facts = {
            "threads": torch.get_num_threads(),
            "cuda": torch.version.cuda,
            "gpus": names,
        }
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "packages": versions,
        "torch": torch_facts,
        "git": git_state(Path(__file__).resolve().parent),
        "command": command_line(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit of the repository around `directory` and whether tracked files differ from it; None
    outside of git.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "-uno")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def command_line(extra: Sequence[str] = ()) -> str:
    """How this program was called, ready for a shell, with `extra` arguments not yet there added;
    values that SECRET finds are left out.
    """
    program, *arguments = sys.argv
    start = ["python", program] if program.endswith(".py") else [Path(program).name]
    arguments += [argument for argument in extra if argument not in arguments]
    return shlex.join([*start, *(SECRET.sub(r"\1=<redacted>", argument) for argument in arguments)])
