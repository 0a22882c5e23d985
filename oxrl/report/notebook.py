"""Runs as a notebook shows them: a page in a frame of its own."""

from __future__ import annotations

import html
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from oxrl.report.page import page_parts
from oxrl.runs.checkpoints import is_run

EVERY_S = 5.0
# It may run its script and save a chart; what is around it is out of its reach.
FRAME = (
    '<iframe srcdoc="{}" sandbox="allow-scripts allow-downloads" '
    'style="border: 0; width: 100%; height: 30rem"></iframe>'
)
# Imported where code runs in a notebook, and nowhere else.
KERNEL = "ipykernel.zmqshell"


class Curves(NamedTuple):
    """A run's result and curves; shown where it is the last thing in a notebook's cell.

    Args:
        directory: of the run.
        names: metrics that have a curve; none: the result, its health and the main ones.
    """

    directory: Path
    names: Sequence[str] = ()

    def _repr_html_(self) -> str:
        page = html.escape("".join(page_parts([self.directory], curves=self.names)))
        return FRAME.format(page)


@contextmanager
def live_curves(directory: Path) -> Iterator[None]:
    """Inside, a notebook that this runs in shows the curves of a run as they grow.

    Args:
        directory: of the run, which may begin later.
    """
    if KERNEL not in sys.modules:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(directory, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(directory: Path, ended: threading.Event) -> None:
    """Draw the curves again and again, and once more when the run has ended."""
    handle = import_module("IPython.display").DisplayHandle()
    draw = handle.display
    going_on = True
    while going_on:
        going_on = not ended.wait(EVERY_S)
        if is_run(directory):
            draw(Curves(directory))
            draw = handle.update
