"""The policy loss that `train.loss` names: of the table, or the user's own."""

from __future__ import annotations

from typing import cast

from oxrl.functional.gates import CLIPPED_GATES, Gate


def find_gate(name: str) -> Gate:
    """Return the function of a policy loss.

    Args:
        name: in `GATES`, or of one of the user's own, whose code is run.

    Raises:
        ConfigError: the user's code cannot be run, or is no policy loss.
    """
    if name in CLIPPED_GATES:
        return CLIPPED_GATES[name]
    from oxrl.functional.policy_losses import GATES  # the rarer losses

    if name in GATES:
        return GATES[name]
    from oxrl.usercode.gates import OwnGate  # losses of the table do without

    return cast(Gate, OwnGate(name))
