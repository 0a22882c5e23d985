"""`oxrl doctor`: what works on this machine, what clashes, and the command that fixes it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

REPAIR = "pip install -e . -c constraints.txt"


@dataclass(frozen=True)
class Finding:
    """One line of the report: FAIL stops training, warn may slow or limit it."""

    state: Literal["ok", "warn", "FAIL"]
    subject: str
    text: str
    fix: str = ""


def examine(runs: Path) -> list[Finding]:
    """Look at Python, packages, devices, memory and disk. `runs` is where run directories will go."""
    return [*_python(), *_packages(), *_torch(), *_shared_memory(), *_disk(runs)]


def _python() -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    state = "ok" if sys.version_info >= (3, 11) else "FAIL"
    yield Finding(
        state, "python", f"{version} at {sys.executable}", "" if state == "ok" else "install Python 3.11 or later"
    )


def _packages() -> Iterator[Finding]:
    """Compare what is installed with what this checkout asks for."""
    try:
        stated = importlib.metadata.requires("oxrl") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("FAIL", "oxrl", "is not installed as a package", "pip install -e . from the checkout")
        return
    yield Finding("ok", "oxrl", f"{importlib.metadata.version('oxrl')} at {Path(__file__).parent}")
    for requirement in map(Requirement, stated):
        extra = _extra_of(requirement)
        if extra == "dev" or (requirement.marker is not None and extra is None and not requirement.marker.evaluate()):
            continue
        fix = REPAIR if extra is None else f'pip install -e ".[{extra}]"'
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if extra is None:
                yield Finding("FAIL", requirement.name, "is not installed", fix)
            else:
                yield Finding("ok", requirement.name, f"not installed (optional: {fix})")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield Finding("ok", requirement.name, version)
        else:
            text = f"{version} is installed, this version of oxRL needs {requirement.specifier}"
            yield Finding("FAIL" if extra is None else "warn", requirement.name, text, fix)


def _extra_of(requirement: Requirement) -> str | None:
    text = str(requirement.marker or "")
    return text.partition("extra ==")[2].strip(" \"'") or None if "extra ==" in text else None


def _torch() -> Iterator[Finding]:
    """Import the two libraries that fail at import when they clash, and list devices."""
    try:
        import torch

        importlib.import_module("transformers")
    # What broken or clashing binaries raise at import.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        yield Finding("FAIL", "import", f"{type(error).__name__}: {error}", REPAIR)
        return
    yield Finding("ok", "threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores (run.threads changes it)")
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        yield Finding("ok", "device", f"cpu; no CUDA device ({built})")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        memory = torch.cuda.get_device_properties(index).total_memory / 1e9
        dtypes = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
        yield Finding("ok", "device", f"cuda:{index} {torch.cuda.get_device_name(index)}, {memory:.0f} GB, {dtypes}")


def _shared_memory() -> Iterator[Finding]:
    path = Path("/dev/shm")
    if path.is_dir():
        size = shutil.disk_usage(path).total / 1e9
        small = size < 0.5
        text = f"{size:.1f} GB; the local engine does not need it, multi-process engines do"
        yield Finding("warn" if small else "ok", "/dev/shm", text, "in a container: --shm-size=8g" if small else "")


def _disk(runs: Path) -> Iterator[Finding]:
    folder = runs
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        fix = "choose another folder with run.dir, or change its permissions"
        yield Finding("FAIL", "run directory", f"{runs.resolve()} cannot be written: {error.strerror}", fix)
        return
    free = shutil.disk_usage(folder).free / 1e9
    fix = "free space or set run.dir to another disk; `oxrl plan` says what a checkpoint needs" if free < 1 else ""
    yield Finding("warn" if free < 1 else "ok", "run directory", f"{runs.resolve()}, {free:.1f} GB free", fix)
