"""A reward that was called once, for tests."""

from __future__ import annotations

from collections.abc import Mapping

from oxrl.rewards.dry_call import dry_call
from oxrl.rewards.loaded import LoadedReward, find_reward


def load_reward(name: str, options: Mapping[str, object] | None = None) -> LoadedReward:
    """Find a reward and call it once on a made-up sample.

    Args:
        name, options: as of `find_reward`.

    Returns:
        The reward, ready to score.

    Raises:
        RewardDefinitionError: nothing loadable under that name, or the dry call failed; says what
            to change.
    """
    reward = find_reward(name, options)
    dry_call(reward)
    return reward
