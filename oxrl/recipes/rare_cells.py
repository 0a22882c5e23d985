"""The functions of cells that the default row has not: advantages of all kinds, rarer losses."""

from __future__ import annotations

from typing import cast

from oxrl.functional.advantages import ADVANTAGES
from oxrl.functional.gates import Gate
from oxrl.functional.group_advantages import Estimator
from oxrl.functional.policy_losses import GATES
from oxrl.usercode.gates import OwnGate


def rare_advantage(name: str) -> Estimator:
    """Return the function of an advantage of the table."""
    return ADVANTAGES[name]


def rare_gate(name: str) -> Gate:
    """Return the function of a policy loss; one of the user's own is found and tried.

    Raises:
        ConfigError: the user's code cannot be run, or is no policy loss.
    """
    return GATES[name] if name in GATES else cast(Gate, OwnGate(name))
