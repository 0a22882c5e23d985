"""Dynamic sampling: prompts are drawn until enough groups have rewards that differ.

Source: DAPO, arXiv:2503.14476, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from oxrl.functional.shaping import informative_groups
from oxrl.recipes.features.base import Feature, FeatureInputs
from oxrl.rollouts.batch import scored_rewards
from oxrl.rollouts.parts import groups_of_different_parts
from oxrl.tables.numbers import SAMPLING_ROUNDS
from oxrl.types import Rollouts


class TeachingGroups:
    """A GroupChoice: only groups whose rewards differ are trained on.

    Groups past the last one needed are not trained on; their prompts are drawn again in the next
    step. Where no group differs, the first ones are trained on with advantage 0.

    Args:
        rounds: most rounds of sampling per rollout step.
        parts: of the reward that are compared one by one: a group teaches where one of them
            differs, although their sums may be equal. Empty: the sums are compared.
    """

    def __init__(self, rounds: int, parts: Sequence[str] = ()) -> None:
        self.rounds = rounds
        self.parts = parts

    def missing(self, rollouts: Rollouts, *, wanted: int, rounds: int) -> int:
        """As many prompts more as should do, at the share of groups that taught so far."""
        teaching = len(self.teaching(rollouts))
        if teaching >= wanted or rounds >= self.rounds:
            return 0
        sampled = len({rollout.group_id for rollout in rollouts})
        needed = math.ceil((wanted - teaching) * sampled / max(teaching, 1))
        return min(wanted, needed)

    def groups(self, rollouts: Rollouts, *, wanted: int) -> tuple[int, ...]:
        """The first `wanted` groups that teach something."""
        every_group = dict.fromkeys(rollout.group_id for rollout in rollouts)
        chosen = self.teaching(rollouts) or list(every_group)
        return tuple(chosen[:wanted])

    def teaching(self, rollouts: Rollouts) -> list[int]:
        """Groups that teach something, in draw order."""
        if self.parts:
            return groups_of_different_parts(rollouts, self.parts)
        # Before any shaping of rewards.
        rewards, group_ids = scored_rewards(rollouts)
        return group_ids[informative_groups(rewards, group_ids)].unique().tolist()


class DynamicSampling(Feature):
    """See the module; reads train.sampling_rounds."""

    def __init__(self, given: FeatureInputs) -> None:
        self.choice = TeachingGroups(given.train.value(SAMPLING_ROUNDS), given.compared_parts)
