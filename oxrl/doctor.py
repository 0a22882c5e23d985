"""`oxrl doctor`: what works on this machine, what clashes, and the command that fixes it."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

REPAIR = "pip install -e . -c constraints.txt"


class Finding(NamedTuple):
    """One line of the report: FAIL stops training, warn may slow or limit it."""

    state: Literal["ok", "warn", "FAIL"]
    subject: str
    text: str
    fix: str = ""


def examine(runs: Path) -> list[Finding]:
    """Look at Python, packages, devices, memory and disk. `runs` is where run directories will
    go.
    """
    python = Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")
    return [python, *_packages(), *_torch(), *_shared_memory(), _disk(runs)]


def _packages() -> Iterator[Finding]:
    """Compare what is installed with what this checkout asks for."""
    try:
        stated = [Requirement(text) for text in requires("oxrl") or []]
    except PackageNotFoundError:
        yield Finding(
            "FAIL", "oxrl", "is not installed as a package", "pip install -e . from the checkout"
        )
        return
    yield Finding("ok", "oxrl", f"{version('oxrl')} at {Path(__file__).parent}")
    for requirement in stated:
        extra = str(requirement.marker or "").partition("extra ==")[2].strip(" \"'")
        if extra == "dev" or (
            requirement.marker and not requirement.marker.evaluate({"extra": extra})
        ):
            continue
        fix = f'pip install -e ".[{extra}]"' if extra else REPAIR
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            optional = Finding("ok", requirement.name, f"not installed (optional: {fix})")
            yield optional if extra else Finding("FAIL", requirement.name, "is not installed", fix)
            continue
        if requirement.specifier.contains(found, prereleases=True):
            yield Finding("ok", requirement.name, found)
        else:
            text = f"{found} is installed, this version of oxRL needs {requirement.specifier}"
            yield Finding("warn" if extra else "FAIL", requirement.name, text, fix)


def _torch() -> Iterator[Finding]:
    """Import the two libraries that fail at import when they clash, and list devices."""
    try:
        import torch

        importlib.import_module("transformers")
    # What broken or clashing binaries raise at import.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        yield Finding("FAIL", "import", f"{type(error).__name__}: {error}", REPAIR)
        return
    yield Finding(
        "ok",
        "threads",
        f"{torch.get_num_threads()} of {os.cpu_count()} cores (run.threads changes it)",
    )
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "torch is a CPU build"
        )
        yield Finding("ok", "device", f"cpu; no CUDA device ({built})")
        return
    dtypes = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 1e9
        yield Finding(
            "ok",
            "device",
            f"cuda:{index} {torch.cuda.get_device_name(index)}, {memory:.0f} GB, {dtypes}",
        )


def _shared_memory() -> Iterator[Finding]:
    path = Path("/dev/shm")
    if path.is_dir():
        size = shutil.disk_usage(path).total / 1e9
        text = f"{size:.1f} GB; the local engine does not need it, multi-process engines do"
        small = Finding("warn", "/dev/shm", text, "in a container: --shm-size=8g")
        yield small if size < 0.5 else Finding("ok", "/dev/shm", text)


def _disk(runs: Path) -> Finding:
    folder = next(parent for parent in (runs, *runs.absolute().parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        fix = "choose another folder with run.dir, or change its permissions"
        return Finding(
            "FAIL", "run directory", f"{runs.resolve()} cannot be written: {error.strerror}", fix
        )
    fix = (
        "free space or set run.dir to another disk; `oxrl plan` says what a checkpoint needs"
        if free < 1
        else ""
    )
    return Finding(
        "warn" if fix else "ok", "run directory", f"{runs.resolve()}, {free:.1f} GB free", fix
    )
