"""Words of the environment are learned too: a policy that can tell what a tool will answer.

    L_RL + coeff mean(CE of the tokens that the environment wrote)

Each of the two means is over its own tokens, so that long answers of a tool weigh no more than
short ones. A second pass reads the same rows.

Source: docs/algorithms.md of prime-rl, where the coefficient is 0.1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oxrl.errors import required
from oxrl.functional.masks import LossAndMetrics
from oxrl.recipes.features.base import FeatureInputs
from oxrl.types import Metrics, Output, PolicyBatch, SupervisedBatch, TokenBatch
from oxrl_features.numbers import Checked, between, problem

NAME = "echo"
WANT = frozenset({"logprobs"})


class Echo(Checked):
    """See the module.

    Args:
        given: what the run is made of.
        coeff: weight of what the environment said; 0: the row itself.
    """

    stays = ("given",)

    def __init__(self, given: FeatureInputs, coeff: float = 0.1) -> None:
        self.coeff = between(NAME, "coeff", coeff, 0.0, 100.0)
        if not given.plays:
            text = (
                "nothing but the policy writes tokens here: set environment.name, or leave it out"
            )
            raise problem(NAME, "environment", text)
        self.given = given

    def add_gradients(self, rows: Tensor, batch: PolicyBatch) -> Metrics | None:
        """Add the gradient of what the environment said."""
        said = environment_tokens(batch.inputs)
        tokens = int(said.sum())
        if not self.coeff or not tokens:
            return {"echo/tokens": float(tokens)}
        heard = SupervisedBatch(
            inputs=replace(batch.inputs, response_mask=said),
            loss_weights=said.float() * (self.coeff / tokens),
        )
        output = self.given.policy.forward_backward(heard, likelihood_loss, WANT)
        logprobs = required(output.logprobs, "logprobs")[said]
        if not logprobs.isfinite().all():
            return None
        return {"echo/tokens": float(tokens), "echo/nll": -float(logprobs.double().mean())}


def environment_tokens(inputs: TokenBatch) -> Tensor:
    """The tokens that an environment wrote: those behind the first one that is trained on in a row,
    but for those that are trained on.

    Args:
        inputs: [B, T], rows as the model reads them.

    Returns:
        [B, T] bool.
    """
    begun = inputs.response_mask.int().cummax(1).values.bool()
    return begun & inputs.attention_mask & ~inputs.response_mask


def likelihood_loss(output: Output, batch: SupervisedBatch) -> LossAndMetrics:
    """The weighted negative log-likelihood; a LossFn.

    Args:
        output: what the policy said.
        batch: rows, and the weights of what is learned of them.
    """
    logprobs = required(output.logprobs, "logprobs")
    mask = batch.inputs.response_mask
    return torch.where(mask, -logprobs * batch.loss_weights, 0.0).sum(), {}
