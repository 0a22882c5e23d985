"""The terminal that somebody may look at."""

from __future__ import annotations

import os
import sys


def on_terminal() -> bool:
    """True if somebody looks at standard error who did not ask for plain text."""
    stream = sys.stderr
    if stream is None or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()
