"""What a run says while it runs: its progress, and its log messages.

Progress is a line that updates in place on a terminal, one plain line per step anywhere else.
Watching never breaks
what is watched: a closed pipe or a terminal without the right letters costs output, not the run.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn

from oxrl.types import Metrics

# label, metric keys (the first one present is shown), format. A column whose metric is absent is
# left out.
COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward/mean",), ".3f"),
    ("loss", ("update/nll", "loss"), ".4f"),
    ("length", ("data/length_mean",), ".1f"),
    ("KL", ("kl/ref_k3", "kl/old_k3"), ".2e"),
    ("tokens/s", ("throughput/tokens_per_s",), ",.0f"),
)
ETA_WINDOW = 20  # steps: long enough to be calm, short enough to follow lengths that grow


class Console(AbstractContextManager["Console"]):
    """Progress of one run on `stream` (standard output unless given)."""

    def __init__(self, total_steps: int, title: str, *, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="replace")
        self._total = total_steps
        self._times: deque[float] = deque([time.monotonic()], maxlen=ETA_WINDOW + 1)
        console = RichConsole(file=self._stream, highlight=False)
        # NO_COLOR asks for plain text, see no-color.org.
        live = console.is_interactive and not console.no_color
        self._progress = _live_line(console, total_steps, title) if live else None

    def step(self, step: int, metrics: Metrics) -> None:
        """Show one optimizer step."""
        self._times.append(time.monotonic())
        found = [
            (label, [metrics[key] for key in keys if key in metrics], form)
            for label, keys, form in COLUMNS
        ]
        shown = [f"{label} {values[0]:{form}}" for label, values, form in found if values]
        per_step = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        text = "  ".join([*shown, f"ETA {format_duration(max(0, self._total - step) * per_step)}"])
        if self._progress is None:
            self._line(f"step {step}/{self._total}  {text}")
        else:
            with self._or_give_up():
                self._progress.update(
                    self._progress.task_ids[0], completed=step, values=text, refresh=True
                )

    def message(self, text: str) -> None:
        """Say what phase the run is in, on a line of its own that stays."""
        if len(self._times) == 1:
            self._times[0] = time.monotonic()  # building the model is not part of a step
        self._line(text)

    def close(self) -> None:
        """Leave the last line on screen and give the terminal back; closing twice is harmless."""
        with self._or_give_up():
            if self._progress is not None:
                self._progress.stop()
        self._progress = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _line(self, text: str) -> None:
        with self._or_give_up():
            if self._progress is not None:
                self._progress.console.print(text, markup=False, soft_wrap=True)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """When the reader of the pipe went away or the stream is closed, send what follows to
        nowhere.

        The next writer to this stream, the command itself for one, would fail otherwise.
        """
        try:
            yield
        except (OSError, ValueError):
            self._progress = None
            with suppress(OSError, ValueError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())


def _live_line(console: RichConsole, total_steps: int, title: str) -> Progress:
    # In 80 columns the numbers matter more than a bar.
    wide = (
        [TextColumn("{task.description}"), BarColumn(bar_width=20)] if console.width >= 110 else []
    )
    counts = [TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[values]}")]
    # No refresh thread: the line changes when a step ends, and nothing runs beside the training.
    progress = Progress(*wide, *counts, console=console, auto_refresh=False)
    progress.add_task(title, total=total_steps, values="starting")
    progress.start()
    return progress


def format_duration(seconds: float) -> str:
    """`9s`, `2m05s`, `3h07m`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


class _Terminal(logging.Handler):
    """Writes to whatever sys.stderr is at that moment: a live progress line replaces it while it is
    on screen.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(self.format(record) + "\n")


@contextmanager
def run_logging(file: Path) -> Iterator[None]:
    """While open, the `oxrl` loggers write to `file` (appending, from INFO up) and to stderr (from
    WARNING up).
    """
    logger = logging.getLogger("oxrl")
    handlers = (
        logging.FileHandler(file, encoding="utf-8", errors="backslashreplace"),
        _Terminal(logging.WARNING),
    )
    for handler, form in zip(
        handlers, ("%(asctime)s %(levelname)s %(name)s: ", "%(levelname)s: "), strict=True
    ):
        handler.setFormatter(logging.Formatter(form + "%(message)s"))
        logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
