"""The speed of the machine at best, tried for some tens of milliseconds when a run starts."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from oxrl.errors import RunDirectoryError
from oxrl.runs.files import pretty_json, read_json, write_atomically

# Long enough to keep all cores of a device busy, short enough not to be noticed.
WIDTH = {"cpu": 512, "cuda": 4096}
MEGABYTES = {"cpu": 64, "cuda": 512}
TIMES = 4
KEY = "speed"


@dataclass(frozen=True)
class MachineSpeed:
    """The speed of a machine.

    flops: operations per second of a matrix product. bandwidth: bytes per second of a copy.
    """

    flops: float
    bandwidth: float


@functools.cache
def machine_speed(device: torch.device, dtype: torch.dtype) -> MachineSpeed:
    """Measure the best of a few products of square matrices, and of a few copies.

    The first of each warms up and is not counted.

    Args:
        device: where the model is. dtype: of its weights.
    """
    width = WIDTH.get(device.type, WIDTH["cpu"])
    matrix = torch.ones(width, width, device=device, dtype=dtype)
    product = torch.empty_like(matrix)
    size = MEGABYTES.get(device.type, MEGABYTES["cpu"]) * 2**20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def multiply() -> None:
        torch.matmul(matrix, matrix, out=product)

    def copy() -> None:
        target.copy_(source)

    with torch.no_grad():
        return MachineSpeed(
            flops=2.0 * width**3 / _best(multiply, device),
            bandwidth=2.0 * size / _best(copy, device),
        )


def _best(work: Callable[[], None], device: torch.device) -> float:
    """Measure the seconds of the fastest time."""
    found: list[float] = []
    for _ in range(TIMES):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def note_speed(folder: Path, speed: MachineSpeed) -> None:
    """Write the speed into environment.json, at the first start of a run."""
    path = folder / "environment.json"
    environment = read_json(path)
    if environment is None:
        raise RunDirectoryError(
            f"{path} is gone, or not the JSON written there. Restore it, or write {{}} into it"
        )
    if KEY not in environment:
        write_atomically(path, pretty_json(environment | {KEY: asdict(speed)}))
