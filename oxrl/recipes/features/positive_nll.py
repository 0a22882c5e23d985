"""An added likelihood of right responses. Source: VAPO, arXiv:2504.05118."""

from __future__ import annotations

from dataclasses import replace

from oxrl.errors import required
from oxrl.functional.masks import LossAndMetrics, weighted_sum
from oxrl.functional.metrics import PASS_REWARD
from oxrl.functional.weights import token_mean
from oxrl.recipes.features.base import Feature, FeatureInputs, Prepared
from oxrl.tables.numbers import NLL_COEFF
from oxrl.types import Output, PolicyBatch


class PositiveNLL(Feature):
    """nll_coeff times the mean negative log-likelihood of the tokens of right responses."""

    def __init__(self, given: FeatureInputs) -> None:
        self.coeff = given.train.value(NLL_COEFF)

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Mark the tokens of responses that were right."""
        passed = prepared.rollouts.rewards > PASS_REWARD
        right = batch.inputs.response_mask & passed[:, None]
        return replace(batch, likelihood_weights=token_mean(right))

    def on_minibatch(self, batch: PolicyBatch) -> PolicyBatch:
        """Normalise over the minibatch's own right responses."""
        weights = required(batch.likelihood_weights, "likelihood_weights")
        right = batch.inputs.response_mask & (weights > 0)
        return replace(batch, likelihood_weights=token_mean(right))

    def loss(self, output: Output, batch: PolicyBatch) -> LossAndMetrics | None:
        """See Feature."""
        logprobs = required(output.logprobs, "logprobs")
        weights = required(batch.likelihood_weights, "likelihood_weights")
        likelihood = weighted_sum(logprobs, batch.inputs.response_mask, weights)
        return -self.coeff * likelihood, {"update/nll": -likelihood.detach()}
