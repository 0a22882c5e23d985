"""The parts of the reward reach the advantage, one by one. Source: GDPO, arXiv:2601.05242."""

from __future__ import annotations

from dataclasses import replace

import torch

from oxrl.functional.group_advantages import AdvantageInputs
from oxrl.recipes.features.base import Feature, FeatureInputs
from oxrl.types import RolloutBatch


class RewardParts(Feature):
    """See the module; reads the weights of `reward.parts`."""

    def __init__(self, given: FeatureInputs) -> None:
        self.weights = given.part_weights

    def on_advantage_inputs(
        self, inputs: AdvantageInputs, rollouts: RolloutBatch
    ) -> AdvantageInputs:
        """Add the parts, in the order of the config."""
        absent = torch.full_like(inputs.rewards, torch.nan)
        columns = [rollouts.part_rewards.get(name, absent) for name in self.weights]
        weights = torch.tensor(list(self.weights.values()), dtype=torch.float64)
        part_rewards = torch.stack(columns, dim=1)
        return replace(inputs, part_rewards=part_rewards, part_weights=weights)
