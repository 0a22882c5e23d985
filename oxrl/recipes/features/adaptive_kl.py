"""The KL coefficient, steered towards a target KL. Source: arXiv:1909.08593, section 2.2."""

from __future__ import annotations

from oxrl.errors import required
from oxrl.functional.masks import masked_sum
from oxrl.functional.shaping import adapt_kl_coeff
from oxrl.recipes.features.base import Feature, FeatureInputs
from oxrl.recipes.session import RolloutProgress
from oxrl.tables.numbers import KL_HORIZON, KL_TARGET
from oxrl.types import Metrics, PolicyBatch


class AdaptiveKL(Feature):
    """See the module; reads train.kl_target and train.kl_horizon."""

    def __init__(self, given: FeatureInputs) -> None:
        self.target = given.train.value(KL_TARGET)
        self.horizon = given.train.value(KL_HORIZON)

    def steer(self, batch: PolicyBatch, progress: RolloutProgress) -> Metrics:
        """Set the next rollout step's coefficient by how far this one's KL is off its target.

        Rows of which nothing is trained on have no KL, and do not count; where all are such, the KL
        is NaN and the coefficient stays.
        """
        sampled = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
        reference = required(batch.ref_logprobs, "ref_logprobs")
        trained = batch.inputs.response_mask
        per_row = masked_sum(sampled - reference, trained, dim=1)[trained.any(1)]
        kl = float(per_row.mean())
        used = float(progress.kl_coeff)
        if len(per_row):
            progress.kl_coeff = adapt_kl_coeff(
                used, kl, kl_target=self.target, kl_horizon=self.horizon, rows=len(per_row)
            )
        return {"kl/coeff": used, "kl/steered": kl}
