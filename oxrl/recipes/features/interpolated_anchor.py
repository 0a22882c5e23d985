"""Old log-probabilities between sampler and current policy by age.

Source: A-3PO, arXiv:2512.06547.
"""

from __future__ import annotations

import dataclasses

from oxrl.recipes.features.base import Feature
from oxrl.types import PolicyBatch


class InterpolatedAnchor(Feature):
    """See the module."""

    old_logprobs = "interpolated"

    def on_minibatch(self, batch: PolicyBatch, *, version: int) -> PolicyBatch:
        """Count the optimizer steps since each token was sampled."""
        return dataclasses.replace(batch, lags=version - batch.versions)
