"""The reference replaced by the policy on a schedule. Source: ProRL, arXiv:2505.24864."""

from __future__ import annotations

from oxrl.recipes.features.base import Feature, FeatureInputs
from oxrl.recipes.session import crossed
from oxrl.tables.numbers import REFERENCE_SYNC_STEPS


class ReferenceReset(Feature):
    """See the module; reads train.reference_sync_steps."""

    moves_reference = True

    def __init__(self, given: FeatureInputs) -> None:
        self.policy = given.policy
        self.reference = given.reference
        self.every = given.train.value(REFERENCE_SYNC_STEPS)

    def after_updates(self, before: int, step: int) -> None:
        """Let the reference be the policy, and the optimizer start afresh, where it is time."""
        if self.reference is None or not crossed(self.every, before, step):
            return
        for engine in (self.reference, self.policy):
            engine.set_weights(named for bucket in self.policy.weights() for named in bucket)
