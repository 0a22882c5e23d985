"""What moves weights: the interface, and what its two ends have in common.

A transport makes copies of the policy's weights, moves them and scores them. Whoever asks sees
fingerprints and log-probabilities, never a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import nn

from oxrl.engines.probe import Forwards, Rows, Shown, perturb, two_forwards
from oxrl.engines.train.base import Bucket
from oxrl.errors import EngineError
from oxrl.types import Images, Metrics

Fingerprints = Mapping[str, str]
# How every LineError begins, also where another process hands on no more than its text.
LINE_BROKE = "the line between ranks and samplers"


class LineError(EngineError):
    """The connection between ranks and samplers broke, or nobody answered on it in time."""


class Copy(NamedTuple):
    """Which copy of the policy's weights.

    dtype: what they are cast to. strength: how much of it is new; 0: they are the policy's.
    """

    dtype: torch.dtype
    strength: float = 0.0


class Delivered(NamedTuple):
    """Fingerprints of what left, and of what arrived."""

    sent: Fingerprints
    received: Fingerprints


class Probe(NamedTuple):
    """Rows of token ids to be scored, at a temperature, and the images that each shows."""

    rows: Rows
    temperature: float
    shown: Shown


class WeightTransport(Protocol):
    """Moves copies of the policy's weights to the sampler."""

    def deliver(self, version: int, copy: Copy) -> Delivered:
        """Load a copy into the sampler, whose next tokens are of `version`.

        Raises:
            WeightSyncError: the sampler cannot load it.
        """
        ...

    def score(self, probe: Probe, copy: Copy) -> Forwards:
        """What a model with these weights says of the probe, where the policy is."""
        ...

    def metrics(self) -> Metrics:
        """Bytes that the last delivery moved, `sync/...`."""
        ...


def copied(weights: Iterator[Bucket], copy: Copy) -> Iterator[Bucket]:
    """The weights as the sampler computes with them."""
    for bucket in weights:
        cast = [(name, tensor.detach().to(copy.dtype)) for name, tensor in bucket]
        if copy.strength:
            cast = [(name, perturb(tensor, copy.strength)) for name, tensor in cast]
        yield cast


def score_copy(
    model: nn.Module,
    weights: Iterator[Bucket],
    probe: Probe,
    copy: Copy,
    images: Images = None,
) -> Forwards:
    """What a model with a copy of the weights says of the probe.

    Args:
        model: of the policy's architecture; its weights do not matter.
        weights: every one, as the policy has it.
        images: those that rows of the probe show; None: there are none.
    """
    return two_forwards(
        model,
        copied(weights, copy),
        probe.rows,
        dtype=copy.dtype,
        temperature=probe.temperature,
        images=images,
        shown=probe.shown,
    )
