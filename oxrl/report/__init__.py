"""`oxrl report`: runs as one HTML file that asks nothing of a network.

From Python this module is called like a function: `oxrl.report([one, other])`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class Report(ModuleType):
    """A module that can be called: importing `oxrl.report.page` puts it where a function was."""

    def __call__(self, runs: Sequence[object], out: str | Path | None = None) -> Path:
        """Write several runs as one HTML page, as `oxrl report` does.

        Args:
            runs: what `train` and `load_run` give, or run directories.
            out: the file; None: report.html in the first of them.

        Returns:
            The file.

        Raises:
            RunDirectoryError: one is no run, or the file cannot be written.
        """
        from oxrl.report.page import write_report

        return write_report([Path(str(getattr(run, "path", run))) for run in runs], out)


sys.modules[__name__].__class__ = Report
