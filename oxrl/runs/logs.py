"""Where log messages of a run go: warnings and up to the terminal, everything to run.log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class _Terminal(logging.Handler):
    """Writes to whatever sys.stderr is at that moment: a live progress line replaces it while it is on screen."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(self.format(record) + "\n")


@contextmanager
def run_logging(file: Path) -> Iterator[None]:
    """While open, the `oxrl` loggers write to `file` (appending, from INFO up) and to stderr (from WARNING up)."""
    logger = logging.getLogger("oxrl")
    to_file = logging.FileHandler(file, encoding="utf-8", errors="backslashreplace")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_terminal = _Terminal(logging.WARNING)
    to_terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    before = logger.level
    logger.setLevel(logging.INFO)
    for handler in (to_file, to_terminal):
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(before)
        for handler in (to_file, to_terminal):
            logger.removeHandler(handler)
            handler.close()
