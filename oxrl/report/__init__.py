"""`oxrl report`: runs as one HTML file that asks nothing of a network.

From Python this module is called like a function: `oxrl.report(run)`, `oxrl.report([one, other])`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from oxrl.errors import RunDirectoryError


class Report(ModuleType):
    """A module that can be called: importing `oxrl.report.page` puts it where a function was."""

    def __call__(self, runs: object, out: str | Path | None = None) -> Path:
        """Write one or several runs as one HTML page, as `oxrl report` does.

        Args:
            runs: what `train` and `load_run` give, or a run directory; or a list of these.
            out: the file; None: report.html in the first of them.

        Returns:
            The file.

        Raises:
            RunDirectoryError: one is no run, there is none, or the file cannot be written.
        """
        from oxrl.report.page import write_report  # `import oxrl` costs nothing

        given = runs if isinstance(runs, Iterable) and not isinstance(runs, str) else [runs]
        paths = [Path(str(getattr(run, "path", run))) for run in given]
        if not paths:
            raise RunDirectoryError(
                "oxrl.report was given an empty list: give a run directory, what oxrl.train or "
                "oxrl.load_run returned, or a list of these"
            )
        return write_report(paths, out)


sys.modules[__name__].__class__ = Report
