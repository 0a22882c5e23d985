"""Rewards of greedy responses, which the groups of their prompts are compared with."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from oxrl.types import Rollouts


def rewards_of_groups(baselines: Rollouts, group_ids: Tensor) -> Tensor:
    """[B] float64: the reward of the baseline of each row's group, NaN where it has none."""
    known = {b.group_id: b.score.value for b in baselines if b.score.value is not None}
    rewards = [known.get(group, nan) for group in group_ids.tolist()]
    return torch.tensor(rewards, dtype=torch.float64)
