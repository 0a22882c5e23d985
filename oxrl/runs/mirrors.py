"""The run's side of its trackers: start their processes, notice when one dies, end them in time.

A mirror is a process of its own that reads the record files as they grow, because importing a
tracker, creating its database and logging a step take seconds and tens of milliseconds that a
thread would take from the training process. It ends when the pipe to its standard input closes, so
it outlives no run, however that run ends. Whatever goes wrong in it is one warning in the run;
metrics.jsonl stays complete, and a later start catches up.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from time import monotonic

from oxrl.errors import Interrupted
from oxrl.runs.directory import RunDirectory
from oxrl.runs.files import open_own
from oxrl.runs.waiting import end_of
from oxrl.tables.watch import TRACKERS

logger = logging.getLogger(__name__)

# How long a run waits for all its mirrors: what a stopping one leaves, its next start catches up.
FINISHED_S = 20.0
STOPPED_S = 2.0
# Libraries that report on their users, or print, unless told.
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "OMP_NUM_THREADS": "1",
}


class Mirror:
    """The process of one tracker. Never raises.

    Args:
        name: of the tracker, one of TRACKERS.
    """

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._title = TRACKERS[name].title
        self._log = run.path / f"{name}.log"
        self._process = None
        try:
            with open_own(self._log, "ab") as log:
                # -P: not a module of the working directory that is named like one of a tracker's.
                command = [sys.executable, "-P", "-m", "oxrl.runs.tracker_process"]
                # A session of its own: Ctrl-C in the terminal is for the run, which then closes the
                # mirror.
                self._process = subprocess.Popen(
                    [*command, name, str(run.path), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **QUIET},
                    start_new_session=True,
                )
        except OSError as error:
            why = "%s will not see this run: its process did not start: %s"
            logger.warning(why, self._title, error)

    def check(self) -> None:
        """Warn, once, if the process died. Costs microseconds."""
        if self._process is not None and self._process.poll() is not None:
            self.wait(0.0)

    def tell(self, outcome: str) -> None:
        """Ask for the end: say how the run ended, and do not wait."""
        if self._process is None or self._process.stdin is None:
            return
        with suppress(OSError):  # it died: that is told in `wait`
            self._process.stdin.write(outcome.encode())
            self._process.stdin.close()

    def wait(self, timeout_s: float) -> None:
        """Let the process catch up for so long, then end it; warn of what went wrong."""
        process = self._process
        self._process = None
        if process is None:
            return
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            end_of(process, self._title)
            late = "%s was not done after %.0f s; metrics.jsonl is complete"
            logger.warning(late, self._title, timeout_s)
            return
        finally:
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        if process.returncode != 0:
            said = ""
            if self._log.exists():
                said = self._log.read_text(encoding="utf-8", errors="replace").strip()
            why = (said or "it said nothing").rpartition("\n")[2]
            text = "%s stopped seeing this run (metrics.jsonl is complete): %s (see %s)"
            logger.warning(text, self._title, why, self._log)


class Trackers(AbstractContextManager["Trackers"]):
    """All trackers of a run; `check` now and then. Never raises.

    As a context manager it closes with the outcome that the exception, if any, stands for.

    Args:
        names: of TRACKERS. A finished run is shown as it is, and starts none.
    """

    def __init__(self, run: RunDirectory, names: Sequence[str]) -> None:
        wanted = () if run.finished else names
        self._mirrors = [Mirror(run, name) for name in wanted]

    def check(self) -> None:
        """Warn, once each, of mirrors that died. Costs microseconds."""
        for mirror in self._mirrors:
            mirror.check()

    def close(self, outcome: str = "FINISHED", *, timeout_s: float | None = None) -> None:
        """Let the mirrors catch up side by side, tell how the run ended, and end them.

        Args:
            outcome: MLflow's own word for how the run ended: FINISHED, FAILED or KILLED.
            timeout_s: how long to wait for all of them; None: by the outcome.
        """
        if timeout_s is None:
            timeout_s = FINISHED_S if outcome == "FINISHED" else STOPPED_S
        for mirror in self._mirrors:
            mirror.tell(outcome)
        begun = monotonic()
        for mirror in self._mirrors:
            mirror.wait(max(0.0, timeout_s - (monotonic() - begun)))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close("FINISHED")
        elif issubclass(kind, Interrupted | KeyboardInterrupt):
            self.close("KILLED")
        else:
            self.close("FAILED")
