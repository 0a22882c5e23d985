"""A reward that Python gives and that cannot leave this process."""

from __future__ import annotations

from collections.abc import Sequence

from oxrl.rewards.dry_call import dry_call, rehearse
from oxrl.rewards.loaded import find_reward
from oxrl.rewards.pools import InlinePool
from oxrl.rewards.trial import rehearse_all
from oxrl.runs.waiting import Patience
from oxrl.types import Objects, Prompt


class OwnFunctionPool(InlinePool):
    """Calls such a function; it cannot be killed.

    Args:
        name, options, field: as of `RewardPool`.
    """

    def __init__(self, name: str, options: Objects | None, field: str) -> None:
        self._reward = find_reward(name, options)
        super().__init__(name, self._reward, field)

    def start(self, patience: Patience | None = None) -> None:
        """Call it on a made-up sample.

        Raises:
            RewardDefinitionError: it can never work.
        """
        dry_call(self._reward)

    def rehearse(self, prompts: Sequence[Prompt], patience: Patience | None = None) -> None:
        """Try the reward on prompts of the data: see `SinglePool.rehearse`."""
        where = f"{self.field}.name={self.name}"
        rehearse_all(where, prompts, lambda prompt: rehearse(self._reward, prompt)[0])
