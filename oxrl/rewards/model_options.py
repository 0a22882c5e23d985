"""Facts about a reward that is the folder of a trained model, and the places of rewards of users,
told without loading any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast, get_args

from oxrl.errors import known
from oxrl.modelfiles.folder import VALUE_HEAD_FILE, is_reward_model
from oxrl.tables.user_code import REWARD
from oxrl.types import Objects
from oxrl.usercode.locate import Place, place_of

# What the chances that the steps are right become: shares of their mean, their sum, or the worst.
StepsRule = Literal["mean", "sum", "worst"]
DEFAULT_STEPS: StepsRule = "mean"
STEPS = "steps"


def place_of_reward(name: str) -> Place:
    """Say where a reward is, without running anything.

    Args:
        name: as of `find_reward`.

    Raises:
        ValueError: as of `place_of`.
    """
    return Place(Path(name).resolve()) if is_reward_model(name) else place_of(REWARD, name)


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


def steps_rule(options: Objects) -> StepsRule:
    """Return the score that a process reward model makes of its steps.

    Args:
        options: of the config, which `model_option_problem` finds right.
    """
    return cast(StepsRule, options.get(STEPS, DEFAULT_STEPS))


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
        with safe_open(folder / VALUE_HEAD_FILE, framework="numpy") as file:
            return (file.metadata() or {}).get("kind", "")
    except (OSError, SafetensorError):
        return ""
