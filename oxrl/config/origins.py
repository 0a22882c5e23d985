"""Models that are named by the run that trained them: which of its checkpoints is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from oxrl.errors import OxrlError
from oxrl.runs.checkpoints import is_run, named_run


def _taken(name: str) -> str:
    """Return what a name stands for: of a run the checkpoint that is taken, else itself."""
    run = named_run(name) if name else None
    if run is None:
        return name
    from oxrl.checkpoint.targets import learned  # most names are not of a run

    try:
        return str(learned(run))
    except (OSError, OxrlError) as error:
        raise ValueError(str(error)) from None


# The name of a model, or the directory of a run that trained one.
Learned = Annotated[str, AfterValidator(_taken)]


def told_origin(name: str) -> str:
    """Say that a model lies in the directory of a run; empty where it does not."""
    # A name such as builtin:tiny is in no folder, though a path of that name would be in this one.
    if not (Path(name).exists() and any(map(is_run, Path(name).parents[:2]))):
        return ""
    return f"begins with what a run learned, as it is in {name}"
