"""Delivery in this process, which calls both policy and sampler: weights go from hand to hand."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import Module

from oxrl.engines.delivery.proof import Forwards, Probe, two_forwards
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.train import BucketStream, TrainEngine
from oxrl.engines.transport.base import Copy, Fingerprints, copied
from oxrl.models.fingerprints import fingerprint
from oxrl.types import Images, Metrics


class Direct:
    """See WeightTransport. What `policy.weights()` yields is what the sampler is given.

    Args:
        new_model: a model of the policy's architecture whose weights do not matter.
        images: those of the probe's rows; None: they have none.
    """

    def __init__(
        self,
        policy: TrainEngine,
        sampler: RolloutEngine,
        new_model: Callable[[], Module],
        images: Images = None,
    ) -> None:
        self._policy = policy
        self._sampler = sampler
        self._new_model = new_model
        self._images = images
        self._passed = 0
        self._sent: Fingerprints = {}

    def deliver(self, version: int, copy: Copy) -> Fingerprints:
        self._passed = 0
        sent: dict[str, str] = {}
        # Nobody here keeps what has left, so it is read on the way.
        self._sent = sent
        return self._sampler.update_weights(self._noted(copy, sent), version)

    def sent(self) -> Fingerprints:
        return self._sent

    def score(self, probe: Probe, copy: Copy) -> Forwards:
        weights = copied(self._policy.weights(copy.part), copy)
        return two_forwards(self._new_model(), weights, probe, copy.dtype, self._images)

    def metrics(self) -> Metrics:
        passed = float(self._passed)
        return {"sync/sent_bytes": passed, "sync/driver_bytes": passed}

    def _noted(self, copy: Copy, sent: dict[str, str]) -> BucketStream:
        """Yield the copy; note in `sent` what it looks like as it leaves."""
        for bucket in copied(self._policy.weights(copy.part), copy):
            for name, tensor in bucket:
                sent[name] = fingerprint(tensor)
                self._passed += tensor.nbytes
            yield bucket
