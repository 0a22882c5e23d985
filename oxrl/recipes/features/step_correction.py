"""Corrections that see more than the ratios of a micro-batch at the start of the update."""

from __future__ import annotations

from dataclasses import replace

from oxrl.errors import required
from oxrl.functional.corrections import CORRECTIONS
from oxrl.recipes.features.base import Feature, FeatureInputs, Prepared
from oxrl.types import PolicyBatch


class StepCorrection(Feature):
    """The correction's weights, decided once over the whole rollout batch."""

    want_before = frozenset({"logprobs"})
    corrects_whole_step = True

    def __init__(self, given: FeatureInputs) -> None:
        name = given.row.correction
        self.correct = CORRECTIONS[name]
        self.numbers = given.train.numbers("correction", name)

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """See the class."""
        logprobs = required(prepared.before.logprobs, "logprobs before the update")
        mask = batch.inputs.response_mask
        weights = self.correct(logprobs, batch.rollout_logprobs, mask, **self.numbers)
        return replace(batch, correction=weights)


class CurrentPolicyCorrection(Feature):
    """A correction that judges the policy being updated, and is given the advantages."""

    corrects_current_policy = True
