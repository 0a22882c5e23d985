"""The control of a run that learns: every reward goes to a response that it does not belong to.

Means stay, the signal is gone: what a run gains all the same is not learned from its reward. Scores
in samples.jsonl are those that the reward gave; advantages are made of the exchanged ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oxrl.recipes.features.base import FeatureInputs
from oxrl.seeds import stable_seed
from oxrl.types import RolloutBatch
from oxrl_features.numbers import Checked


class PermutedRewards(Checked):
    """See the module.

    Args:
        given: what the run is made of; its seed decides the exchange.
    """

    def __init__(self, given: FeatureInputs) -> None:
        self.seed = given.seed

    def on_rollouts(self, batch: RolloutBatch) -> RolloutBatch:
        """Exchange rewards, their parts and those of tokens over the whole batch.

        The exchange follows from the seed of the run and the step, which its first prompt names:
        the same one after a resume, and however many ranks train.
        """
        if not len(batch):
            return batch
        step = int(batch.group_ids.min())
        chance = torch.Generator().manual_seed(stable_seed("control", self.seed, step))
        giver = torch.randperm(len(batch), generator=chance)
        parts = {name: values[giver] for name, values in batch.part_rewards.items()}
        return replace(
            batch,
            rewards=batch.rewards[giver],
            token_rewards=moved(batch.token_rewards, batch.inputs.response_mask, giver),
            part_rewards=parts,
        )


def moved(token_rewards: Tensor, mask: Tensor, giver: Tensor) -> Tensor:
    """The rewards of tokens, given to the responses of other rows.

    What was earned so many tokens before the end of a response is earned as many before the end of
    the other one, or at its first token, where that is shorter: sums stay.

    Args:
        token_rewards: [B, T].
        mask: [B, T] bool, tokens that the policy sampled.
        giver: [B] int64, whose rewards a row gets.

    Returns:
        [B, T], of the same type.
    """
    found = torch.zeros_like(token_rewards)
    for row, source in enumerate(giver.tolist()):
        earned = token_rewards[source][mask[source]].flip(0)
        places = mask[row].nonzero()[:, 0].flip(0)
        if not len(places):
            continue
        nearest = torch.arange(len(earned)).clamp(max=len(places) - 1)
        found[row].index_add_(0, places[nearest], earned)
    return found
