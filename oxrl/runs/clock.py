"""The seconds of a step by phase, the memory of this process, and the speed of the machine at best,
tried for some tens of milliseconds when a run starts.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, perf_counter

import torch

from oxrl.errors import RunDirectoryError
from oxrl.runs.device import wait_for
from oxrl.runs.files import pretty_json, read_json, write_atomically
from oxrl.types import Metrics

# What a loop does between two phases belongs to the one before: every second of a step has a name.
SETUP = "time/setup_s"  # models, workers, the first checkpoint
ROWS = "time/rows_s"  # samples become rows, rows of data become a batch
SAMPLES = "time/samples_s"  # samples are written, the batch is cut into minibatches
RECORD = "time/record_s"  # the line is made and written, its step shown
AFTER = {"time/rollout_s": ROWS, "time/reward_s": ROWS, "time/logprobs_s": SAMPLES}
# Of the machine's speed: long enough to keep all cores of a device busy, short enough not to be
# noticed.
WIDTH = {"cpu": 512, "cuda": 4096}
MEGABYTES = {"cpu": 64, "cuda": 512}
TIMES = 4
KEY = "speed"


def _nobody(key: str) -> None:
    """Ignore that a phase began: nobody wants to know."""


class Clock:
    """Seconds per phase, added up until they are taken for the line of a step."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._step_started = monotonic()
        # When the newest phase ended, what the time since belongs to, and how many phases are open.
        self._last = self._step_started
        self._between = SETUP
        self._open = 0
        self._counters: list[Callable[[], Metrics]] = []
        self._derived: list[Callable[[Metrics], Metrics]] = []
        # Is told of every phase that begins, by its key.
        self.tell: Callable[[str], None] = _nobody

    def also(self, counters: Callable[[], Metrics]) -> None:
        """Have something else counted for the line of each step.

        Args:
            counters: says what there was since it was called last.
        """
        self._counters.append(counters)

    def derive(self, derived: Callable[[Metrics], Metrics]) -> None:
        """Have something else computed for the line of each step.

        Args:
            derived: is given the seconds of the step by phase.
        """
        self._derived.append(derived)

    @contextmanager
    def phase(self, key: str) -> Iterator[None]:
        """Add the seconds spent inside to metric `key` of the next step's line."""
        start = monotonic()
        if not self._open:
            given = self._between == RECORD and key == "time/update_s"  # a loop over rows of data
            self._seconds[ROWS if given else self._between] += start - self._last
        self._open += 1
        self.tell(key)
        try:
            yield
        finally:
            end = monotonic()
            self._seconds[key] += end - start
            self._open -= 1
            self._last = end
            self._between = AFTER.get(key, RECORD)

    def restart(self) -> None:
        """Begin a step now: what was before, such as what a resume took, does not count."""
        self._seconds.clear()
        self._step_started = monotonic()
        self._last = self._step_started
        self._between = RECORD

    def take(self) -> Metrics:
        """Return the seconds of every phase and of the whole step; a new step begins."""
        now = monotonic()
        self._seconds[self._between] += now - self._last
        seconds = dict(self._seconds)
        seconds["time/step_s"] = now - self._step_started
        self.restart()
        for derived in self._derived:
            seconds |= derived(seconds)
        for counters in self._counters:
            seconds |= counters()
        return seconds


def resident_mb() -> float:
    """Resident memory of this process right now, in MB; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


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
    multiply = functools.partial(torch.matmul, matrix, matrix, out=product)
    copy = functools.partial(target.copy_, source)
    with torch.no_grad():
        return MachineSpeed(
            flops=2.0 * width**3 / _best(multiply, device),
            bandwidth=2.0 * size / _best(copy, device),
        )


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Measure the seconds of the fastest time."""
    found: list[float] = []
    for _ in range(TIMES):
        wait_for(device)
        start = perf_counter()
        work()
        wait_for(device)
        found.append(perf_counter() - start)
    return min(found[1:])


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
