"""Choice of the pool that scores by a reward."""

from __future__ import annotations

from oxrl.rewards.base import find_reward
from oxrl.rewards.builtin import BUILTINS, find_builtin
from oxrl.rewards.pools import InlinePool, SinglePool
from oxrl.types import Objects


def reward_pool(
    name: str,
    *,
    workers: int = 1,
    timeout_s: float = 10.0,
    options: Objects | None = None,
    field: str = "reward",
) -> SinglePool:
    """What scores by a reward: this process where it cannot hang, else workers.

    Args:
        name, workers, timeout_s, options, field: as of `RewardPool`.

    Raises:
        RewardDefinitionError: as of `RewardPool`.
    """
    if name in BUILTINS and find_builtin(name).inline:
        return InlinePool(find_reward(name, options), field)
    from oxrl.rewards.workers import pool_of  # processes, which the others need

    return pool_of(name, workers=workers, timeout_s=timeout_s, options=options, field=field)
