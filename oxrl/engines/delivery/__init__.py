"""New weights on their way from the training engine to samplers.

A sampler that reads the policy's own memory gets no copy, and nothing is to be proved: that is
`SharedWeights`. One that has weights of its own gets them from `sync.py`, which proves that they
arrived.
"""

from __future__ import annotations

from typing import Protocol

from oxrl.engines.sample import RolloutEngine
from oxrl.engines.train import Part, TrainEngine
from oxrl.types import Metrics, Rollouts


class Delivery(Protocol):
    """Hands the policy's weights to the sampler."""

    def deliver(self, version: int) -> None:
        """Have the sampler compute with the policy's weights.

        Args:
            version: what they are called from now on: optimizer steps taken.

        Raises:
            WeightSyncError: it provably does not.
        """
        ...

    def remember(self, rollouts: Rollouts) -> Metrics:
        """Take the newest samples, to prove the next deliveries by.

        Args:
            rollouts: of the step that is over.

        Returns:
            What it cost to deliver the weights that they were sampled with, `sync/...`.
        """
        ...


class SharedWeights:
    """See Delivery.

    Args:
        policy: whose weights the sampler reads.
        sampler: a new version makes it forget what it computed with the last one.
        part: of a policy with an adapter, what the sampler is given.
    """

    def __init__(self, policy: TrainEngine, sampler: RolloutEngine, part: Part = "all") -> None:
        self._policy = policy
        self._sampler = sampler
        self._part: Part = part

    def deliver(self, version: int) -> None:
        """See Delivery."""
        self._sampler.update_weights(self._policy.weights(self._part), version)

    def remember(self, rollouts: Rollouts) -> Metrics:
        """See Delivery: nothing is sent, so that nothing is proved."""
        return {}
