"""The functions of cells that the default row has not: advantages of all kinds, rarer losses."""

from __future__ import annotations

from typing import cast

from oxrl.functional.advantages import ADVANTAGES
from oxrl.functional.gates import Gate
from oxrl.functional.group_advantages import Estimator
from oxrl.functional.policy_losses import GATES
from oxrl.tables.policy import Row
from oxrl.usercode.gates import OwnGate


def rare_cells(row: Row) -> tuple[Estimator, Gate]:
    """Return the functions of a row's advantage and of its policy loss.

    A loss of the user's own is found and tried.

    Raises:
        ConfigError: the user's code cannot be run, or is no policy loss.
    """
    gate = cast(Gate, OwnGate(row.gate)) if row.has_own_loss else GATES[row.gate]
    return ADVANTAGES[row.advantage], gate
