"""The seconds of a step by phase, and the memory of this process."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from oxrl.types import Metrics

# What a loop does between two phases belongs to the one before: every second of a step has a name.
SETUP = "time/setup_s"  # models, workers, the first checkpoint
ROWS = "time/rows_s"  # samples become rows, rows of data become a batch
SAMPLES = "time/samples_s"  # samples are written, the batch is cut into minibatches
RECORD = "time/record_s"  # the line is made and written, its step shown
AFTER = {"time/rollout_s": ROWS, "time/reward_s": ROWS, "time/logprobs_s": SAMPLES}


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
        """Begin a step now: what a resume took does not count."""
        self._seconds.clear()
        self._step_started = monotonic()
        self._last = self._step_started
        self._between = RECORD

    def take(self) -> Metrics:
        """Return the seconds of every phase and of the whole step; a new step begins."""
        now = monotonic()
        self._seconds[self._between] += now - self._last
        self._last = now
        self._between = RECORD
        seconds = dict(self._seconds)
        seconds["time/step_s"] = now - self._step_started
        for derived in self._derived:
            seconds |= derived(seconds)
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
