"""Old log-probabilities between sampler and current policy by age.

Source: A-3PO, arXiv:2512.06547.
"""

from __future__ import annotations

from dataclasses import replace

from oxrl.recipes.features.base import Feature, FeatureInputs, Prepared
from oxrl.types import PolicyBatch


class InterpolatedAnchor(Feature):
    """See the module."""

    old_logprobs = "interpolated"

    def __init__(self, given: FeatureInputs) -> None:
        self.updates = given.train.updates

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Count the rollout batches trained on since each token was sampled.

        The age is that at the start of the update, and stays while the batch is trained on: the
        sampler's weights are as old for its last minibatch as for its first.
        """
        optimizer_steps = prepared.version - batch.versions
        ages = (optimizer_steps + self.updates - 1) // self.updates
        return replace(batch, ages=ages)
