"""Only the tokens of the highest entropy learn: those where a response may go one way or another.

    loss weights * 1[H >= quantile of H over all sampled tokens of the step]

H is the entropy of the policy before the update. Weights keep their denominator, which counts all
tokens, as in the paper: a step with fewer forks is a smaller one.

Source: arXiv:2506.01939, equation 6, where the quantile is 0.8.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oxrl.errors import required
from oxrl.recipes.features.base import FeatureInputs, Prepared
from oxrl.recipes.session import RolloutProgress
from oxrl.types import Metrics, PolicyBatch
from oxrl_features.numbers import Checked, between


class EntropyMask(Checked):
    """See the module.

    Args:
        given: what the run is made of.
        quantile: share of the tokens that learn nothing; 0: the row itself.
    """

    def __init__(self, given: FeatureInputs, quantile: float = 0.8) -> None:
        self.quantile = between("entropy-mask", "quantile", quantile, 0.0, 0.99)
        # Nothing is asked of the policy that the row does not ask for, where all tokens learn.
        self.want_before = frozenset({"entropy"} if self.quantile else ())
        self._learns = torch.zeros(0, 0, dtype=torch.bool)
        self._group_ids = torch.zeros(0, dtype=torch.int64)

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Find the tokens, by what the policy said of the whole rollout batch."""
        self._group_ids = batch.group_ids
        self._learns = batch.inputs.response_mask
        if self.quantile and self._learns.any():
            entropy = required(prepared.before.entropy, "entropy")
            self._learns = forks(entropy, self._learns, quantile=self.quantile)
        return batch

    def steer(self, batch: PolicyBatch, progress: RolloutProgress) -> Metrics:
        """Nothing is moved; it is told how many of the tokens learn."""
        tokens = max(int(batch.inputs.response_mask.sum()), 1)
        return {"entropy_mask/frac": float(self._learns.sum()) / tokens}

    def on_minibatch(self, batch: PolicyBatch) -> PolicyBatch:
        """Take the weight of the other tokens away.

        The rows of a minibatch are those of its groups, in the order of the rollout batch.
        """
        rows = torch.isin(self._group_ids, batch.group_ids)
        weights = torch.where(self._learns[rows], batch.loss_weights, 0.0)
        return replace(batch, loss_weights=weights)


def forks(entropy: Tensor, mask: Tensor, *, quantile: float) -> Tensor:
    """The tokens of the highest entropy.

    Args:
        entropy: [B, T] nats.
        mask: [B, T] bool, tokens that count.
        quantile: share of them that is left out; those that are as high as the last one stay.

    Returns:
        [B, T] bool, within `mask`.
    """
    counted = entropy[mask].double()
    place = int(quantile * len(counted))
    lowest = counted.sort().values[min(place, len(counted) - 1)]
    return mask & (entropy >= lowest)
