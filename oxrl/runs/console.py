"""The output of a run while it runs: its progress, and its log messages.

Progress is a line that updates in place on a terminal, one plain line per step anywhere else.
Watching never breaks what is watched: a closed pipe or a terminal without the right letters costs
output, not the run.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Literal, TextIO

from rich.console import Console as RichConsole

from oxrl.errors import OxrlError, RunDirectoryError
from oxrl.redact import shown
from oxrl.runs.files import Record, open_own
from oxrl.runs.waiting import WAITING
from oxrl.types import Metrics

if TYPE_CHECKING:
    from oxrl.runs.clock import Clock
    from oxrl.runs.recorder import Recorder

# label, metric keys (the first one present is shown), format (z: what rounds to 0 has no sign). A
# column whose metric is absent is left out.
COLUMNS = (
    ("reward", ("reward/mean",), "z.3f"),
    ("loss", ("update/nll", "update/loss"), "z.4f"),
    ("accuracy", ("preference/accuracy", "reward_model/accuracy"), "z.3f"),
    ("margin", ("preference/margin", "reward_model/margin"), "z.3f"),
    ("desirable", ("preference/desirable_reward",), "z.3f"),
    ("undesirable", ("preference/undesirable_reward",), "z.3f"),
    ("length", ("data/length_mean",), ".1f"),
    ("KL", ("kl/ref_k3", "kl/old_k3"), ".2e"),
    ("entropy", ("policy/entropy",), ".2f"),
    ("tokens/s", ("throughput/tokens_per_s",), ",.0f"),
    ("eval reward", ("eval/reward",), "z.3f"),
    ("eval accuracy", ("eval/accuracy",), "z.3f"),
    ("eval loss", ("eval/loss",), "z.4f"),
)
# The loss of a policy gradient says nothing: where rewards are, they are shown.
REWARD = "reward/mean"
PART = "reward/part/"
MOST_PARTS = 4  # on the line of a step
Mode = Literal["auto", "plain", "verbose", "quiet"]
# Libraries with log handlers of their own, which would write over the live view.
NOISY = ("transformers", "huggingface_hub", "datasets", "mlflow", "ray", "deepspeed", "vllm")
# The least log messages that a terminal shows, where these are not of WAITING.
TERMINAL_LEVELS = {"verbose": logging.INFO, "quiet": logging.WARNING}
PLAIN_EVERY_S = 5.0  # between two plain lines about the same work
ETA_WINDOW = 20  # steps: long enough to be calm, short enough to follow lengths that grow
LINE_END = "⏎"
PHASES = {
    "sampling": ("time/rollout_s",),
    "reward": ("time/reward_s",),
    "update": ("time/logprobs_s", "time/update_s"),
}


class Console(AbstractContextManager["Console"]):
    """Progress of one run.

    Args:
        total_steps: of the run.
        title: its name.
        mode: auto: a live view on a terminal, else plain lines; plain: always those; verbose:
            those, with where the time went and a sample; quiet: nothing but messages.
        stream: where to; None: standard output.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        mode: Mode = "auto",
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stdout or _Nowhere()
        self._quiet = mode == "quiet"
        self._verbose = mode == "verbose"
        self._sample = ""
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="replace")
        self._total = total_steps
        self._worked = -PLAIN_EVERY_S  # when a plain line about work was written
        self._times: deque[float] = deque(maxlen=ETA_WINDOW + 1)
        console = RichConsole(file=self._stream, highlight=False)
        # NO_COLOR asks for plain text, see no-color.org.
        live = mode == "auto" and console.is_interactive and not console.no_color
        self._view = None
        if live:
            from oxrl.runs.live import LiveView  # of a terminal that somebody looks at

            self._view = LiveView(console, total_steps, shown(title))

    def watch(self, clock: Clock, recorder: Recorder) -> None:
        """Show the phases that a clock measures, and the samples that a recorder writes."""
        if self._view is not None:
            clock.tell = self.doing
        if self._view is not None or self._verbose:
            recorder.show = self.samples

    def step(self, step: int, metrics: Metrics) -> None:
        """Show one optimizer step."""
        self._times.append(monotonic())
        if self._quiet:
            return
        numbers = "  ".join(_columns(metrics))
        eta = ""
        if len(self._times) > 1:  # the first step sets up what the others find there
            per_step = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
            eta = f"ETA {format_duration(max(0, self._total - step) * per_step)}"
        if self._view is not None:
            with self._or_give_up():
                self._view.step(step, numbers, eta, list(phase_shares(metrics)), metrics)
            return
        text = "  ".join(filter(None, (numbers, eta)))
        if self._verbose:
            text = "  ".join([text, *phase_shares(metrics), *efficiency(metrics)])
        self._line(f"step {step}/{self._total}  {text}")
        if self._sample:
            self._line(f"  {self._sample}")
            self._sample = ""

    def doing(self, phase: str) -> None:
        """Show what the run is at.

        Args:
            phase: the metric that its seconds go to.
        """
        if self._view is not None:
            with self._or_give_up():
                self._view.doing(phase)

    def samples(self, lines: Sequence[Record]) -> None:
        """Show the newest of some samples, as samples.jsonl has them."""
        if not lines:
            return
        text = sample_text(lines[-1])
        if self._view is not None:
            self._view.sample(text)
        elif self._verbose:
            self._sample = text

    def work(self, what: str, done: int, total: int, *, unit: str, rate: float) -> None:
        """Show how far a long piece of work outside of the steps is.

        Args:
            what: the work, in a word.
            done: of `total` units.
            unit: what is counted, in the plural.
            rate: units per second so far; 0 where that is not known.
        """
        if self._quiet:
            return
        text = f"{what} {done}/{total} {unit}"
        if rate:
            left = format_duration((total - done) / rate)
            text += f"  {rate:,.3g} {unit}/s  ETA {left}"
        if self._view is not None:
            with self._or_give_up():
                self._view.work(text)
            return
        now = monotonic()
        if done == total or now - self._worked >= PLAIN_EVERY_S:
            self._worked = now
            self._line(text)

    def message(self, text: str) -> None:
        """Say what phase the run is in, on a line of its own that stays."""
        self._line(shown(text))

    def close(self) -> None:
        """Leave the last line on screen and give the terminal back; closing twice is harmless."""
        with self._or_give_up():
            if self._view is not None:
                self._view.stop()
        self._view = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _line(self, text: str) -> None:
        with self._or_give_up():
            if self._view is not None:
                self._view.say(text)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """Send what follows to nowhere once the reader of the pipe went away.

        The next writer to this stream, the command itself for one, would fail otherwise.
        """
        try:
            yield
        except (OSError, ValueError, AttributeError):  # a stream of a program may lack a method
            self._view = None
            with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())


def _columns(metrics: Metrics) -> Iterator[str]:
    """Yield the numbers of a step, each with its label."""
    for label, keys, form in COLUMNS:
        values = [metrics[key] for key in keys if key in metrics]
        if values and not (label == "loss" and REWARD in metrics):
            yield f"{label} {values[0]:{form}}{bounds(metrics, keys[0])}"
        if label == "reward":
            yield from _part_columns(metrics)


def bounds(metrics: Metrics, name: str) -> str:
    """Return the interval of a metric, as in " [0.824, 0.868]"; nothing where none is known.

    Args:
        metrics: of a step or an evaluation.
        name: of the one; its ends have `_low` and `_high` behind it.
    """
    low = metrics.get(f"{name}_low", math.nan)
    high = metrics.get(f"{name}_high", math.nan)
    return "" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]"


def _part_columns(metrics: Metrics) -> list[str]:
    """List the mean of every part of a reward, for the first few, without what they are made of."""
    names = [key.removeprefix(PART) for key in metrics if key.startswith(PART)]
    parts = [name for name in names if "/" not in name and "." not in name]
    return [f"{name} {metrics[PART + name]:z.3f}" for name in parts[:MOST_PARTS]]


def format_duration(seconds: float) -> str:
    """`9s`, `2m05s`, `3h07m`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


class _Nowhere(io.StringIO):
    """A stream in place of one that was closed before this program began."""

    def write(self, text: str, /) -> int:
        return len(text)


class _Shown(logging.Formatter):
    """A format for the words of others: they are neither obeyed nor taken for lines of ours."""

    def __init__(self, form: str, *, indent: str = "") -> None:
        super().__init__(form)
        self._indent = indent

    def format(self, record: logging.LogRecord) -> str:
        """Format one record, the lines after its first one indented."""
        return shown(super().format(record)).replace("\n", f"\n{self._indent}")


class _Lines(logging.Handler):
    """Writes lines; a full disk, or a log that is taken away, costs some of them and not the run.

    Args:
        write: takes a line.
    """

    def __init__(self, write: Callable[[str], object], form: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(form)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            self._write(self.format(record) + "\n")


def _to_terminal(line: str) -> None:
    """Write to whatever sys.stderr is at that moment: a live progress line replaces it."""
    if sys.stderr is not None:
        sys.stderr.write(line)


@contextmanager
def _noise_to(handler: logging.Handler) -> Iterator[None]:
    """Send what other libraries log to a handler instead of theirs, while open."""
    before: dict[str, tuple[list[logging.Handler], bool]] = {}
    for name in NOISY:
        logger = logging.getLogger(name)
        before[name] = (logger.handlers, logger.propagate)
        logger.handlers = [handler]
        logger.propagate = False
    try:
        yield
    finally:
        for name, (handlers, propagate) in before.items():
            logger = logging.getLogger(name)
            logger.handlers = handlers
            logger.propagate = propagate


@contextmanager
def run_logging(file: Path, mode: Mode = "auto") -> Iterator[None]:
    """Log to `file` from INFO up and to stderr from WAITING up, while open; to stderr from INFO
    where `mode` is verbose and from WARNING where it is quiet. Other libraries log to `file` alone.

    What ends the run goes to the file, with its traceback where it is no error of ours.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    logger = logging.getLogger("oxrl")
    try:
        run_log = open_own(file, "ab")
    except OSError as error:
        raise RunDirectoryError(f"{file} cannot be written: {error}") from error

    def to_run_log(line: str) -> None:
        run_log.write(line.encode("utf-8", errors="backslashreplace"))

    form = _Shown("%(asctime)s %(levelname)s %(name)s: %(message)s", indent="  ")
    to_file = _Lines(to_run_log, form)
    to_terminal = _Lines(_to_terminal, _Shown("%(levelname)s: %(message)s"))
    to_terminal.setLevel(TERMINAL_LEVELS.get(mode, WAITING))
    logger.addHandler(to_file)
    logger.addHandler(to_terminal)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with _noise_to(to_file):
            yield
    except Exception as error:
        where = None if isinstance(error, OxrlError) else error
        logger.info("the run ends by %s: %s", type(error).__name__, error, exc_info=where)
        raise
    finally:
        logger.setLevel(before)
        logger.removeHandler(to_file)
        logger.removeHandler(to_terminal)
        run_log.close()


def sample_text(line: Record) -> str:
    """Put a sample on one line: what was asked, what came, what it earned."""
    reward = line.get("reward")
    earned = f"{reward:.3g}" if isinstance(reward, float | int) else str(line.get("status", ""))
    return f"[{earned}] {_one_line(line.get('prompt'))} → {_one_line(line.get('response'))}"


def _one_line(value: object) -> str:
    return shown(str(value)).replace("\n", LINE_END).replace("\t", " ")


def phase_shares(metrics: Metrics) -> Iterator[str]:
    """Yield the shares of a step's time, for phases that took a tenth of it or more."""
    total = metrics.get("time/step_s", 0.0)
    for name, keys in PHASES.items():
        spent = sum(metrics.get(key, 0.0) for key in keys)
        if total and spent >= 0.1 * total:
            yield f"{name} {spent / total:.0%}"


def efficiency(metrics: Metrics) -> Iterator[str]:
    """Say how much of the machine a step used, and how much of that was wasted, if known."""
    for name, key in (("MFU", "throughput/mfu"), ("wasted", "waste/total")):
        if key in metrics:
            yield f"{name} {metrics[key]:.0%}"


def on_terminal() -> bool:
    """True if somebody looks at standard error who did not ask for plain text."""
    stream = sys.stderr
    if stream is None or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return False
    return hasattr(stream, "isatty") and stream.isatty()
