"""A device that is none: PyTorch's PrivateUse1 backend over ordinary memory, computed by the CPU.

`pretend_device.cpp` beside this file says what it does. A process that has the device has it for
good, so what is run on it is run in a process of its own (pretend_runs.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.command_line import PRETEND, share_server

SOURCE = Path(__file__).with_suffix(".cpp")
CACHE = Path(__file__).resolve().parents[2] / "build" / "pretend_device"
NAME = "pretend"
EXTENSION = "pretend_extension"
COMPILER_S = 280


def why_not() -> str | None:
    """Why it cannot be compiled here; None where it can."""
    if sys.platform != "linux":
        return f"the pretend device was never compiled on {sys.platform}"
    if _compiler() is None:
        return "the pretend device needs a C++ compiler: g++, or one that the variable CXX names"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "the pretend device needs Python's headers (on Debian and Ubuntu: python3-dev)"
    return None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def compiled() -> Path:
    """The compiled extension: compiled once per source, torch and Python, by one process at a time;
    a test that asks for it is skipped where it cannot be.
    """
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    import torch

    versions = f"{torch.__version__} {sys.implementation.cache_tag} {platform.machine()}"
    key = hashlib.sha256(SOURCE.read_bytes() + versions.encode()).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    found = CACHE / f"{EXTENSION}-{key}.so"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.is_file():
            _compile(found)
    return found


def _compile(target: Path) -> None:
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    unfinished = target.with_suffix(".unfinished")
    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    command = [str(_compiler()), "-O1", "-std=c++20", "-fPIC", "-shared", "-w"]
    command += [f"-DTORCH_EXTENSION_NAME={EXTENSION}"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{folder}" for folder in folders]
    command += [str(SOURCE), "-o", str(unfinished)]
    command += [f"-L{folder}" for folder in library_paths()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILER_S)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stderr[-4000:]}"
    unfinished.rename(target)


@cache
def offered() -> Any:
    """What the extension offers, such as `lack_float64`; the process has the device from then on.

    It must not have gone through a backward pass yet: PyTorch counts devices at the first one.
    """
    import torch

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # `parameter.data = ...` does not change the device of a parameter to one of this backend, as it
    # does between the CPU and CUDA, MPS or XPU: modules that move exchange whole parameters.
    torch.__future__.set_swap_module_params_on_conversion(True)
    spec = importlib.util.spec_from_file_location(EXTENSION, compiled())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def server() -> Iterator[None]:
    """Have a server from which processes with the device are forked, or skip the test."""
    if sys.version_info >= (3, 14):
        pytest.skip("from Python 3.14 on a fork server takes none but the process that started it")
    compiled()
    if PRETEND in os.environ:
        yield
        return
    end = share_server(Path(os.environ["XDG_CACHE_HOME"]), PRETEND)
    try:
        yield
    finally:
        del os.environ[PRETEND]
        end()


def _module() -> types.ModuleType:
    """What PyTorch looks for as `torch.pretend`."""
    import torch

    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: None
    module.manual_seed_all = lambda seed: None
    module.empty_cache = torch.accelerator.empty_cache
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
