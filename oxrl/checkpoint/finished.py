"""A run is finished where result.json says so, and the checkpoints and metrics.jsonl agree."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from oxrl.checkpoint.verify import latest_checkpoint
from oxrl.errors import NoCheckpointError, RunDirectoryError
from oxrl.runs.checkpoints import CHECKPOINTS
from oxrl.runs.files import Json, read_json, read_records

RESULT_FILE = "result.json"


def is_finished(run: Path, steps: int) -> tuple[bool, str]:
    """Return True if nothing is left to do; and why result.json is not believed where it says so.

    Args:
        run: its directory.
        steps: that it should have.

    Returns:
        False with an empty text where the file is not there, or speaks of fewer steps.
    """
    path = run / RESULT_FILE
    if not path.exists():
        return False, ""
    result = read_json(path) or {}
    step = result.get("step")
    if type(step) is not int:
        return False, "it is not the JSON that was written there"
    if step < steps:
        return False, ""
    try:
        doubt = _why_doubted(run, step, result)
    except (NoCheckpointError, RunDirectoryError) as error:
        doubt = str(error)
    return not doubt, doubt


def _why_doubted(run: Path, step: int, result: Json) -> str:
    """Say what checkpoints and metrics hold against a result of `step` steps; empty if nothing."""
    newest = latest_checkpoint(run / CHECKPOINTS)
    if newest is None or newest.step != step:
        found = "there is no checkpoint" if newest is None else f"the newest is {newest.path.name}"
        return f"it says that step {step} was reached, and {found}"
    last = deque(read_records(run / "metrics.jsonl"), maxlen=1)
    if not last or {"step": step, **last[0]} != result:
        return "it is not the last line of metrics.jsonl"
    return ""
