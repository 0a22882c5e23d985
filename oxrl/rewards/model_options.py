"""Facts about a reward that is a folder with a trained model, told without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from oxrl.errors import known
from oxrl.types import Objects

HEAD = "value_head.safetensors"
# What the chances that the steps are right become: shares of their mean, their sum, or the worst.
StepsRule = Literal["mean", "sum", "worst"]
DEFAULT_STEPS: StepsRule = "mean"
STEPS = "steps"


def is_model(name: str) -> bool:
    """True if a reward's name is the folder of a reward model.

    Args:
        name: `reward.name` of a config.

    Returns:
        True where there is a folder of that name with a reward model's head in it; nothing is
        loaded.
    """
    return (Path(name) / HEAD).is_file()


def model_option_problem(name: str, options: Objects) -> str:
    """Say why a reward model cannot take some options; empty if it can.

    Args:
        name: its folder.
        options: of the config, `reward.options`.

    Returns:
        What is wrong, and what is right.
    """
    unknown = sorted(set(options) - {STEPS})
    if unknown:
        return f"a reward model takes only {STEPS}, and no {unknown[0]}"
    if STEPS not in options:
        return ""
    rule = options[STEPS]
    try:
        known(str(rule), get_args(StepsRule))
    except ValueError as error:
        return f"{STEPS} {error}"
    if kind_of(Path(name)) != "process":
        return f"{STEPS} is of a process reward model, which judges steps; {name} judges the whole"
    return ""


def kind_of(folder: Path) -> str:
    """Return what the head of a reward model judges.

    Args:
        folder: of the reward model.

    Returns:
        "process" if it judges steps, else what its file says; empty where that cannot be read,
        which loading the model will say.
    """
    # Only of a model with options: it imports numpy.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / HEAD, framework="numpy") as file:
            return (file.metadata() or {}).get("kind", "")
    except (OSError, SafetensorError):
        return ""
