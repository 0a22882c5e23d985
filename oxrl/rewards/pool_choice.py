"""Choice of the pool that scores by a reward."""

from __future__ import annotations

from oxrl.rewards.builtin import find_builtin, inline_reward
from oxrl.rewards.pools import InlinePool, SinglePool
from oxrl.tables.user_code import REWARD
from oxrl.types import Objects
from oxrl.usercode.locate import is_ours


def reward_pool(
    name: str,
    *,
    workers: int = 1,
    timeout_s: float = 10.0,
    options: Objects | None = None,
    field: str = "reward",
) -> SinglePool:
    """The pool of a reward: this process where it cannot hang or leave, else workers.

    Args:
        name, workers, timeout_s, options, field: as of `RewardPool`.

    Raises:
        RewardDefinitionError: as of `RewardPool`.
    """
    if is_ours(REWARD, name) and find_builtin(name).inline:
        return InlinePool(name, inline_reward(name, options), field)
    from oxrl.usercode.given import given, is_here  # a reward of the core does without

    if is_here(name):
        from oxrl.usercode.packing import packed  # most rewards have a name elsewhere

        if packed(given(name, REWARD.noun)) is None:
            from oxrl.rewards.own_function import OwnFunctionPool

            return OwnFunctionPool(name, options, field)
    from oxrl.rewards.workers import RewardPool  # processes, which the others need

    return RewardPool(name, workers=workers, timeout_s=timeout_s, options=options, field=field)
