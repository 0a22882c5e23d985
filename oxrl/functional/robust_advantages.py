"""Advantages that one odd reward in a group does not decide.

Args of every estimator are those of group_advantages.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.group_advantages import Groups, check_rewards, in_dtype_of
from oxrl.tables.numbers import IQR_FLOOR

QUARTILES = (0.25, 0.5, 0.75)


def iqr_normalize(
    rewards: Tensor, group_ids: Tensor, *, iqr_floor: float = IQR_FLOOR.default
) -> Tensor:
    """The reward's distance from the group's median, in inter-quartile ranges.

    A_i = (R_i - median) / max(Q3 - Q1, iqr_floor)

    Quartiles lie between two rewards in a straight line. In a group of eight one reward, however
    odd, moves them from one ordinary reward to another, while a standard deviation grows with it
    until all others are alike. Where most rewards are equal, the range is 0 and the floor divides.

    Args:
        rewards, group_ids: [B], as in the module's docstring.
        iqr_floor: least range, in units of the reward.

    Returns:
        [B].

    Source: oxRL; median and range as robust scalers have them.
    """
    check_rewards(rewards, group_ids)
    groups = Groups.of(group_ids)
    points = torch.tensor(QUARTILES, dtype=torch.float64, device=rewards.device)
    found = torch.zeros_like(rewards, dtype=torch.float64)
    for group in range(len(groups.count)):
        rows = groups.index == group
        own = rewards[rows].double()
        low, middle, high = own.quantile(points)
        found[rows] = (own - middle) / (high - low).clamp(min=iqr_floor)
    return in_dtype_of(rewards, torch.where(groups.flat(rewards), 0.0, found))
