"""The view of a run on a terminal: a few lines that stand in place while it goes on.

On a narrow terminal it is one line. Everything that is drawn is drawn when something happens: no
thread runs beside the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import isfinite

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from oxrl.types import Metrics

WIDE = 110  # columns of a terminal that has room for more than the numbers
HIGH = 12  # its lines
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE = 20  # newest rewards
# What a phase is called while it lasts.
DOING = {
    "time/rollout_s": "sampling",
    "time/reward_s": "scoring",
    "time/logprobs_s": "computing log-probabilities",
    "time/update_s": "updating",
    "time/eval_s": "evaluating",
    "time/checkpoint_s": "saving",
}


class LiveView:
    """The lines of one run.

    Args:
        console: of the terminal.
        total_steps: of the run.
        title: its name.
    """

    def __init__(self, console: RichConsole, total_steps: int, title: str) -> None:
        self.console = console
        self._wide = console.width >= WIDE
        self._high = self._wide and console.height >= HIGH
        self._rewards: deque[float] = deque(maxlen=SPARKLINE)
        self._doing = "starting"
        self._work = ""
        self._numbers = ""
        self._eta = ""
        self._shares: list[str] = []
        self._sample = ""
        self._step = 0
        self._total = total_steps
        self._progress = _bar(console, total_steps, title)
        self._live = Live(
            self._drawn(), console=console, auto_refresh=False, vertical_overflow="crop"
        )
        self._live.start()

    def step(self, step: int, numbers: str, eta: str, shares: list[str], metrics: Metrics) -> None:
        """Show that a step is done."""
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        self._numbers = numbers
        self._eta = eta
        self._shares = shares
        self._work = ""
        self._step = step
        self._draw()

    def doing(self, phase: str) -> None:
        """Show that a phase began, by the name of its metric."""
        self._doing = DOING.get(phase, "")
        self._work = ""
        self._draw()

    def work(self, text: str) -> None:
        """Show how far a long piece of work is."""
        self._work = text
        self._draw()

    def sample(self, text: str) -> None:
        """Take the newest sample, on one line. It is shown with the next change."""
        self._sample = text

    def say(self, text: str) -> None:
        """Print a line above, which stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last lines where they are."""
        self._doing = ""
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._live.update(self._drawn(), refresh=True)

    def _drawn(self) -> Group | Text:
        if not self._wide:
            # The numbers matter more than a bar, and what is cut off is the last of them.
            told = (f"{self._step}/{self._total}", self._eta, self._work or self._numbers)
            return _one(filter(None, (*told, "" if self._numbers else self._doing)))
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=self._step, eta=self._eta, doing=self._doing)
        numbers = self._work or self._numbers
        trend = [*filter(None, (sparkline(self._rewards), *self._shares))]
        if not self._high:
            return Group(self._progress, _one([numbers, *trend]))
        # A line of its own, which many numbers cannot push off the terminal.
        sample = Text(self._sample, no_wrap=True, overflow="ellipsis", style="dim")
        return Group(self._progress, _one([numbers]), *([_one(trend)] if trend else []), sample)


def _one(parts: Iterable[str]) -> Text:
    """Join texts to one line, cut off where the terminal ends."""
    return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")


def _bar(console: RichConsole, total_steps: int, title: str) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[eta]}", markup=False),
        TextColumn("{task.fields[doing]}", markup=False, style="bold"),
    )
    progress = Progress(*columns, console=console, auto_refresh=False)
    progress.add_task(title, total=total_steps, eta="", doing="")
    return progress


def sparkline(values: Iterable[float]) -> str:
    """Draw numbers as a row of bars, from their smallest to their largest."""
    known = [value for value in values if isfinite(value)]
    if len(known) < 2:
        return ""
    least = min(known)
    span = max(known) - least
    bars = ""
    for value in known:
        place = (value - least) / span if span else 0.0
        bars += SPARKS[round(place * (len(SPARKS) - 1))]
    return bars
