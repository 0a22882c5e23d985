"""The interface of what moves weights, and what its two ends have in common.

A transport makes copies of the policy's weights, moves them and scores them. Whoever asks sees
fingerprints and log-probabilities, never a tensor.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from oxrl.engines.delivery.proof import Forwards, Probe, perturb
from oxrl.engines.train import BucketStream, Fingerprints, Part
from oxrl.errors import EngineError
from oxrl.models.rounded import round_rows
from oxrl.types import Metrics

# How names in a sampler's answer begin: of weights that it made, and of what it made them from.
MADE = "made/"
BASE = "base/"
# How every LineError begins, also where another process hands on no more than its text.
LINE_BROKE = "the line between ranks and samplers"


class LineError(EngineError):
    """The connection between ranks and samplers broke, or nobody answered on it in time."""


class Copy(NamedTuple):
    """A description of a copy of the policy's weights.

    dtype: what the sampler computes in; all weights are cast to it, but an adapter's are not.
    strength: how much of it is new; 0: they are the policy's. part: which of them. bits: of a
    weight, where matrices are rounded; None: they are not.
    """

    dtype: torch.dtype
    strength: float = 0.0
    part: Part = "all"
    bits: int | None = None

    @property
    def sent_as(self) -> torch.dtype | None:
        """The dtype that tensors are cast to before they are sent; None: they are not cast."""
        return None if self.part == "adapter" else self.dtype


class Arrived(NamedTuple):
    """Fingerprints that a sampler answers with.

    tensors: of what arrived. made: of weights that it made of an adapter and what is under it;
    base: of what is. Both are empty where a sampler makes nothing.
    """

    tensors: Fingerprints
    made: Fingerprints
    base: Fingerprints

    @classmethod
    def of(cls, answered: Fingerprints) -> Arrived:
        """Take an answer of a sampler apart by how its names begin.

        Args:
            answered: name -> fingerprint; names of made weights begin with MADE, of those under
                them with BASE.

        Returns:
            The three parts, without these beginnings.
        """
        parts: dict[str, dict[str, str]] = {"": {}, MADE: {}, BASE: {}}
        for name, found in answered.items():
            kind = next((kind for kind in (MADE, BASE) if name.startswith(kind)), "")
            parts[kind][name.removeprefix(kind)] = found
        return cls(parts[""], parts[MADE], parts[BASE])


class WeightTransport(Protocol):
    """Moves copies of the policy's weights to the sampler."""

    def deliver(self, version: int, copy: Copy) -> Fingerprints:
        """Load a copy into the sampler, whose next tokens are of `version`.

        Args:
            version: that the next tokens of the sampler carry.
            copy: which of them: dtype, how much of it is new, all or the adapter alone.

        Returns:
            Fingerprints by name, of what the sampler says has arrived.

        Raises:
            WeightSyncError: the sampler cannot load it.
        """
        ...

    def sent(self) -> Fingerprints:
        """Return fingerprints, by name, of what left here in the last delivery.

        They take a pass over all of it, so they are made when they are asked for.
        """
        ...

    def score(self, probe: Probe, copy: Copy) -> Forwards:
        """Score the probe with a model that has these weights, where the policy is.

        Args:
            probe: rows of token ids, with the temperature to score them at.
            copy: which copy of the weights.

        Returns:
            Log-probabilities in nats of the rows, in the sampler's dtype and in a higher one.
        """
        ...

    def metrics(self) -> Metrics:
        """Return the bytes that the last delivery moved, `sync/...`."""
        ...


def copied(weights: BucketStream, copy: Copy) -> BucketStream:
    """Yield the weights as the sampler computes with them.

    Args:
        weights: buckets of the policy's, which are not changed.
        copy: their dtype, and how much of them is new.

    Returns:
        Buckets with the same names.
    """
    for bucket in weights:
        cast = [(name, tensor.detach().to(copy.sent_as or tensor.dtype)) for name, tensor in bucket]
        if copy.strength:
            cast = [(name, perturb(tensor, copy.strength)) for name, tensor in cast]
        if copy.bits:
            cast = [(name, round_rows(tensor, copy.bits)) for name, tensor in cast]
        yield cast
