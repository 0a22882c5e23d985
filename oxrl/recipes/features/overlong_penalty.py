"""A reward penalty that grows towards the token limit. Source: DAPO, arXiv:2503.14476, Eq. 13."""

from __future__ import annotations

from dataclasses import replace

import torch

from oxrl.functional.shaping import informative_groups, overlong_penalty
from oxrl.recipes.features.base import Feature, FeatureInputs
from oxrl.tables.cells import DYNAMIC_SAMPLING
from oxrl.tables.numbers import OVERLONG_BUFFER
from oxrl.types import RolloutBatch


class OverlongPenalty(Feature):
    """See the module; reads train.overlong_buffer."""

    def __init__(self, given: FeatureInputs) -> None:
        self.max_tokens = given.max_tokens
        self.buffer_tokens = given.train.value(OVERLONG_BUFFER) or max(1, given.max_tokens // 5)
        self._of_chosen = given.row.has(DYNAMIC_SAMPLING)

    def on_rollouts(self, batch: RolloutBatch) -> RolloutBatch:
        """Add the penalty to each row's reward, on its last token."""
        mask = batch.inputs.response_mask
        penalty = overlong_penalty(
            mask.sum(1), max_tokens=self.max_tokens, buffer_tokens=self.buffer_tokens
        )
        if self._of_chosen:
            # Groups that are alike but for their lengths were not sampled for those.
            penalty = penalty * informative_groups(batch.rewards, batch.group_ids)
        tokens_from_here = mask.flip(1).cumsum(1).flip(1)
        last = mask & (tokens_from_here == 1)
        return replace(
            batch,
            rewards=batch.rewards + penalty,
            token_rewards=batch.token_rewards + torch.where(last, penalty[:, None], 0.0),
        )
