"""Episodes of several turns in the training loop: what advantages see of turns, and the rows that
the update reads.

Built where a config names an environment, whatever the row of the table needs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from oxrl.data.episode_rows import EpisodeInputs
from oxrl.functional.group_advantages import AdvantageInputs
from oxrl.recipes.features.base import Feature
from oxrl.recipes.session import RolloutProgress
from oxrl.types import Metrics, PolicyBatch, RolloutBatch


class Episodes(Feature):
    """See the module."""

    def __init__(self) -> None: ...

    def on_advantage_inputs(
        self, inputs: AdvantageInputs, rollouts: RolloutBatch
    ) -> AdvantageInputs:
        """Add which turn a token belongs to, and which episodes were cut between two turns."""
        mask = inputs.response_mask
        places = torch.arange(mask.shape[1])
        last = torch.where(mask, places, -1).amax(1)
        # After a turn that was cut there is nothing more to read.
        next_turn = rollouts.inputs.attention_mask.sum(1) > last + 1
        return replace(inputs, turns=rollouts.turns, next_turn=next_turn)

    def steer(self, batch: PolicyBatch, progress: RolloutProgress) -> Metrics:
        """Nothing is moved; it is told how many rows the episodes are read in."""
        inputs = batch.inputs
        rows = inputs.rows if isinstance(inputs, EpisodeInputs) else inputs
        return {"episode/rows": float(len(rows))}

    def on_minibatch(self, batch: PolicyBatch) -> PolicyBatch:
        """From here on rows: ratios, corrections and masks of a sequence are those of a row."""
        return batch.inputs.as_read(batch)
