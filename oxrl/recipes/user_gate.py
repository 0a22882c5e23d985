"""The policy loss that `train.loss` names: of the table, or the user's own."""

from __future__ import annotations

from typing import cast

from oxrl.config.sections.train import is_own
from oxrl.functional.clipped_losses import CLIPPED_GATES
from oxrl.functional.gates import Gate


def find_gate(loss: str) -> Gate:
    """Return the function of a policy loss.

    Args:
        loss: name in `GATES`, `path.py:function`, or the name of what Python gives; the file is
            run.

    Raises:
        ConfigError: the file cannot be run, or there is no such function.
    """
    if loss in CLIPPED_GATES:
        return CLIPPED_GATES[loss]
    if not is_own(loss):
        from oxrl.functional.policy_losses import GATES  # the rarer losses

        return GATES[loss]
    from oxrl.recipes.own_gate import OwnGate  # losses of the table do without

    return cast(Gate, OwnGate(loss))
