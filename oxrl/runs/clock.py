"""Where the seconds of a step went, and the memory."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from oxrl.types import Metrics


def _nobody(key: str) -> None:
    """Does not want to know."""


class Clock:
    """Seconds per phase, added up until they are taken for the line of a step."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._step_started = time.monotonic()
        self._counters: list[Callable[[], Metrics]] = []
        # Is told of every phase that begins, by its key.
        self.tell: Callable[[str], None] = _nobody

    def also(self, counters: Callable[[], Metrics]) -> None:
        """Have something else counted for the line of each step.

        Args:
            counters: says what there was since it was called last.
        """
        self._counters.append(counters)

    @contextmanager
    def phase(self, key: str) -> Iterator[None]:
        """Add the seconds spent inside to metric `key` of the next step's line."""
        start = time.monotonic()
        self.tell(key)
        try:
            yield
        finally:
            self._seconds[key] += time.monotonic() - start

    def restart(self) -> None:
        """The step begins now: what a resume took does not count."""
        self._step_started = time.monotonic()

    def take(self) -> Metrics:
        """The seconds of every phase and of the whole step; a new step begins."""
        now = time.monotonic()
        seconds = dict(self._seconds)
        seconds["time/step_s"] = now - self._step_started
        for counters in self._counters:
            seconds |= counters()
        self._seconds.clear()
        self._step_started = now
        return seconds


def resident_mb() -> float:
    """Resident memory of this process right now, in MB; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
