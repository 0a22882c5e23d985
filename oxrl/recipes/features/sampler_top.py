"""The sampler's likeliest tokens: the policy is asked about them, before and in the update."""

from __future__ import annotations

from dataclasses import replace

from oxrl.recipes.features.base import Feature, FeatureInputs, Prepared
from oxrl.recipes.score_centering import head_ids, outcomes_of, sampler_outcomes
from oxrl.tables.numbers import CENTER_TOP
from oxrl.types import CANDIDATES, PolicyBatch, RolloutBatch


class SamplerTop(Feature):
    """Asks the policy for them, and keeps what it said before the update."""

    def __init__(self, given: FeatureInputs) -> None:
        top = given.train.value(CENTER_TOP)
        self.want = frozenset({f"top_k={top}", "rest_logprobs"})
        self.want_old = self.want
        self.from_sampler = given.train.old_logprobs == "bypass"

    def on_rollouts(self, batch: RolloutBatch) -> RolloutBatch:
        """Name the tokens that are asked about: those of the sampler, not those of the policy."""
        inputs = batch.inputs
        named = {**inputs.columns, CANDIDATES: head_ids(inputs).long()}
        return replace(batch, inputs=replace(inputs, columns=named))

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Keep what their ratios are measured against, where that is known before the update."""
        if prepared.before.top_logprobs is not None:
            return replace(batch, old_outcomes=outcomes_of(prepared.before))
        if self.from_sampler:
            return replace(batch, old_outcomes=sampler_outcomes(batch.inputs.columns))
        return batch
