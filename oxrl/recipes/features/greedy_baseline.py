"""The reward of the greedy response to the same prompt as a baseline.

Source: ReMax, arXiv:2310.10505.
"""

from __future__ import annotations

from dataclasses import replace

from oxrl.functional.group_advantages import AdvantageInputs
from oxrl.recipes.features.base import Feature
from oxrl.types import RolloutBatch


class GreedyBaseline(Feature):
    """See the module."""

    greedy_baseline = True

    def on_advantage_inputs(
        self, inputs: AdvantageInputs, rollouts: RolloutBatch
    ) -> AdvantageInputs:
        """See Feature."""
        return replace(inputs, greedy_rewards=rollouts.greedy_rewards)
