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
from typing import Literal, NamedTuple, get_args

from packaging.requirements import Requirement

from oxrl.entry_points import OURS, Offer, all_offers
from oxrl.errors import ConfigError, known
from oxrl.modelfiles.folder import FLASH_INSTALL
from oxrl.redact import shown

State = Literal["ok", "missing", "warn", "FAIL"]
REPAIR = "pip install -e . -c constraints.txt"


class Diagnosis(NamedTuple):
    """One line of the report: FAIL stops training, warn may slow or limit it, missing is optional
    and not there.

    optional: no run needs it but those that its text names.
    """

    state: State
    subject: str
    text: str
    fix: str = ""
    optional: bool = False


def examine(runs: Path) -> list[Diagnosis]:
    """Look at Python, packages, devices, memory and disk.

    Args:
        runs: where run directories will go.
    """
    python = Diagnosis("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")
    return [python, *_packages(), *_torch(), *_shared_memory(), *_needs_of_packages(), _disk(runs)]


def _packages() -> Iterator[Diagnosis]:
    """Compare what is installed with what this checkout asks for."""
    try:
        stated = [Requirement(text) for text in requires("oxrl") or []]
    except PackageNotFoundError:
        yield Diagnosis(
            "FAIL", "oxrl", "is not installed as a package", "pip install -e . from the checkout"
        )
        return
    yield Diagnosis("ok", "oxrl", f"{version('oxrl')} at {Path(__file__).parent}")
    extras: dict[str, list[str]] = {}
    for requirement in stated:
        marker = requirement.marker
        extra = str(marker or "").partition("extra ==")[2].strip(" \"'")
        applies = marker is None or marker.evaluate({"extra": extra})
        if applies and extra != "dev":
            extras.setdefault(requirement.name, []).append(extra)
    for requirement in stated:
        if requirement.name in extras:
            asking = extras.pop(requirement.name)
            fix = f'pip install -e ".[{asking[0]}]"' if asking[0] else REPAIR
            yield _package(requirement, asking, fix)
    # Behind an option, and no extra can install it.
    asking = ["model.attention: flash_attention_2 on a GPU"]
    yield _package(Requirement("flash-attn"), asking, FLASH_INSTALL)


def _package(requirement: Requirement, extras: list[str], fix: str) -> Diagnosis:
    """Look whether a package is installed, in a version that fits.

    Args:
        requirement: names it.
        extras: what asks for it, most often extras of oxRL; the first is "" where every run needs
            it.
        fix: what installs it.
    """
    name = requirement.name
    optional = bool(extras[0])
    purpose = f", for {', '.join(extras)}" if optional else ""
    try:
        found = version(name)
    except PackageNotFoundError:
        state = "missing" if optional else "FAIL"
        return Diagnosis(state, name, f"not installed{purpose}", fix, optional)
    if requirement.specifier.contains(found, prereleases=True):
        return Diagnosis("ok", name, found + purpose, "", optional)
    text = f"{found} is installed, this version of oxRL needs {requirement.specifier}"
    return Diagnosis("warn" if optional else "FAIL", name, text + purpose, fix, optional)


def _torch() -> Iterator[Diagnosis]:
    """Import the two libraries that fail at import when they clash, and list devices."""
    try:
        import torch

        importlib.import_module("transformers")
    # What broken or clashing binaries raise at import.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        yield Diagnosis("FAIL", "import", f"{type(error).__name__}: {error}", REPAIR)
        return
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores (run.threads changes it)"
    yield Diagnosis("ok", "threads", threads)
    if not torch.cuda.is_available():
        built = "torch is a CPU build"
        if torch.version.cuda:
            built = f"torch is built for CUDA {torch.version.cuda}"
        from oxrl.runs.device import chosen_device, lacking  # torch can be imported

        found = chosen_device()
        lacks = lacking(found)
        said = f"{found}; {lacks}" if lacks else str(found)
        yield Diagnosis("ok", "device", f"{said}; no CUDA device ({built})")
        return
    dtypes = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        size = f"{device.total_memory / 1e9:.0f} GB"
        yield Diagnosis("ok", "device", f"cuda:{index} {device.name}, {size}, {dtypes}")


def _shared_memory() -> Iterator[Diagnosis]:
    path = Path("/dev/shm")
    if not path.is_dir():
        return
    size = shutil.disk_usage(path).total / 1e9
    text = f"{size:.1f} GB; the local engine does not need it, multi-process engines do"
    fix = "in a container: --shm-size=8g" if size < 0.5 else ""
    yield Diagnosis("warn" if fix else "ok", "/dev/shm", text, fix)


def _needs_of_packages() -> Iterator[Diagnosis]:
    """Ask installed packages about what they need, such as a sandbox for programs of the model."""
    for offer in all_offers("oxrl.doctor"):
        try:
            with offer.asked() as examine:
                found = [_of_package(offer, *said) for said in examine()]
        except ConfigError as error:
            found = [Diagnosis("warn", offer.package, str(error), optional=True)]
        yield from found


def _of_package(offer: Offer, state: State, subject: str, text: str, fix: str) -> Diagnosis:
    """Read one line of a package's, and say whose it is.

    Raises:
        ValueError: the state is none.
    """
    known(state, get_args(State))
    if offer.package != OURS:
        text = f"{text} (says the package {offer.package})"
    return Diagnosis(state, shown(subject), shown(text), shown(fix), optional=True)


def _disk(runs: Path) -> Diagnosis:
    folder = next(parent for parent in (runs, *runs.absolute().parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        text = f"{runs.absolute()} cannot be written: {error.strerror}"
        fix = "choose another folder with run.dir, or change its permissions"
        return Diagnosis("FAIL", "run directory", text, fix)
    text = f"{runs.absolute()}, {free:.1f} GB free"
    fix = (
        "free space or set run.dir to another disk; `oxrl plan` says what a checkpoint needs"
        if free < 1
        else ""
    )
    return Diagnosis("warn" if fix else "ok", "run directory", text, fix)
