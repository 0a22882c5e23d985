"""Bars of commands that take a while, on standard error of a terminal; nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from oxrl.runs.console import on_terminal

Item = TypeVar("Item")
# Between two looks at how far something is, in seconds.
EVERY_S = 0.1
# What, how many are done, of how many.
Tell = Callable[[str, int, int], None]


@contextmanager
def bars() -> Iterator[Tell]:
    """Show, while open, how far the work is that it is told of; the bars go when it closes."""
    if not on_terminal():
        yield _nowhere
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = RichConsole(stderr=True)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            # Of how many is not always known.
            progress.update(tasks[what], completed=done, total=total or None, refresh=True)

        yield tell


def _nowhere(what: str, done: int, total: int) -> None:
    """Show nothing: nobody looks."""


def followed(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Yield the same items, and tell of each as it is taken.

    Args:
        items: any number of them.
        what: they are, in the plural.
    """
    with bars() as tell:
        count = Count(tell, what, 0)  # of how many is not known
        for item in items:
            yield item
            count.one()


class Count:
    """Counts what is done, and tells of it now and then and at the end.

    Args:
        tell: whom.
        what: is counted.
        total: how many there will be; 0: nobody knows.
        every_s: how often, in seconds.
    """

    def __init__(self, tell: Tell, what: str, total: int, *, every_s: float = EVERY_S) -> None:
        self._tell = tell
        self._what = what
        self._total = total
        self._done = 0
        self._every_s = every_s
        self._told = monotonic()

    def one(self, item: object = None) -> None:
        """Count one more."""
        self._done += 1
        now = monotonic()
        if self._done == self._total or now - self._told >= self._every_s:
            self._told = now
            self._tell(self._what, self._done, self._total)
