"""The device that models live on: which one it is, what it lacks, and waiting for it.

Whatever PyTorch calls its accelerator is one: nothing here names a maker where it need not.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from oxrl.errors import ConfigError

CPU = torch.device("cpu")
# Types that a run may want, and what is done where a device has none.
WANTED = {
    torch.float64: "losses and norms are computed on the CPU",
    torch.bfloat16: "model.dtype must be float32",
}

APPLES_WORDS = "MPS backend out of memory"


def chosen_device(asked: str = "auto", *, alone: bool = True) -> torch.device:
    """Find the device that `run.device` means on this machine.

    Args:
        asked: auto, or the kind of a device.
        alone: one process trains and samples. Several know the CPU and CUDA, so auto takes no
            other.

    Raises:
        ConfigError: PyTorch sees no device of that kind.
    """
    found = torch.accelerator.current_accelerator(check_available=True) or CPU
    if asked == "auto":
        return found if alone or found.type == "cuda" else CPU
    if asked in ("cpu", found.type):
        return torch.device(asked)
    seen = "" if found == CPU else f" (it sees {found.type})"
    raise ConfigError(
        f"run.device is {asked} but PyTorch sees no {asked.upper()} device{seen}; "
        "use run.device=cpu or auto"
    )


@cache
def has_type(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a device can hold numbers of a type and add them up: it is tried."""
    try:
        torch.ones(2, dtype=dtype, device=device).sum()
    except (TypeError, RuntimeError) as error:
        if is_out_of_memory(error):  # which says nothing of types, and is remembered
            raise
        return False
    return True


def lacking(device: torch.device) -> str:
    """Say which of the types that a run may want a device has not, and what is done; or nothing."""
    missing = {dtype: done for dtype, done in WANTED.items() if not has_type(device, dtype)}
    said = (f"no {str(dtype).removeprefix('torch.')}: {done}" for dtype, done in missing.items())
    return "; ".join(said)


def home_of_float64(device: torch.device) -> torch.device:
    """The device, or the CPU where that has no float64, in which losses and norms are computed."""
    return device if has_type(device, torch.float64) else CPU


def where_float64_is(values: Tensor) -> Tensor:
    """The tensor, or a copy on the CPU where its device has no float64."""
    return values.to(home_of_float64(values.device))


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def free_cache(device: torch.device) -> None:
    """Give back memory of a device that PyTorch only keeps.

    `torch.accelerator` does not do that for Apple's devices; the module of each device does.
    """
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def is_out_of_memory(error: Exception) -> bool:
    """True if a device had no room; Apple's say so in words alone."""
    return isinstance(error, torch.OutOfMemoryError) or str(error).startswith(APPLES_WORDS)


def is_apart(device: torch.device) -> bool:
    """True if a device has memory of its own, which pinned memory of the CPU exchanges faster."""
    return device.type not in ("cpu", "mps")
