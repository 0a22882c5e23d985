"""The log-probabilities of sampler and trainer, by the same weights, compared bit by bit.

Built where `run.exact` says that they are the same. Of every token that the weights of the update
have sampled the two are compared; tokens of older weights are not, as the trainer no longer has
those.

    before the update   where the policy is asked about all rows (`train.old_logprobs: recompute`)
    in the first one    of the optimizer steps on a batch: the later ones compute with new weights
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.errors import InvariantError, required
from oxrl.recipes.features.base import Feature, Prepared
from oxrl.recipes.session import RolloutProgress
from oxrl.types import Metrics, Output, PolicyBatch, RolloutBatch


class Comparison(NamedTuple):
    """A batch of which sampler and trainer have said the same tokens.

    batch: rows, and what the sampler said of them. said: by the trainer, [B, T]. compared: [B, T]
    bool, which tokens are of the trainer's weights. differs: those of them whose bits differ.
    """

    batch: PolicyBatch | RolloutBatch
    said: Tensor
    compared: Tensor
    differs: Tensor


class SameBits(Feature):
    """Looks at every update; changes nothing, and ends a run in which one token differs."""

    def __init__(self) -> None:
        self._version = 0
        # Nothing has been learned from the rollout batch yet.
        self._untouched = False
        self._before: Comparison | None = None
        self._in_update: Comparison | None = None
        self._compared = 0

    def __getstate__(self) -> dict[str, object]:
        # With the loss it is sent to training ranks, which compare nothing.
        return vars(SameBits())

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Compare what the policy said before the update, where it was asked."""
        self._version = prepared.version
        self._untouched = True
        self._compared = 0
        said = prepared.before.logprobs
        self._before = None
        if said is not None:
            self._before = compare(said, prepared.rollouts, self._version)
        return batch

    def steer(self, batch: PolicyBatch, progress: RolloutProgress) -> Metrics:
        """Tell what was compared before the update, now that all samples are recorded.

        Raises:
            InvariantError: a token differs.
        """
        self._count(self._before, torch.arange(len(batch)))
        self._before = None
        return {}

    def loss(self, output: Output, batch: PolicyBatch) -> None:
        """Compare what is said in the update: the last time, without gradient, of all its rows."""
        if self._untouched and not torch.is_grad_enabled():
            said = required(output.logprobs, "logprobs")
            self._in_update = compare(said, batch, self._version)

    def add_gradients(self, rows: Tensor, batch: PolicyBatch) -> Metrics:
        """Tell what was compared.

        Raises:
            InvariantError: a token differs.
        """
        self._count(self._in_update, rows)
        self._untouched = False
        self._in_update = None
        return {"mismatch/bits": 0.0, "mismatch/bits_compared": float(self._compared)}

    def _count(self, found: Comparison | None, rows: Tensor) -> None:
        """Add to what was compared; `rows` [B] int64 are the places of rows in the batch."""
        if found is None:
            return
        if found.differs.any():
            raise _differs(found, rows, step=self._version + 1)
        self._compared += int(found.compared.sum())


def compare(said: Tensor, batch: PolicyBatch | RolloutBatch, version: int) -> Comparison:
    """Find the tokens of which the trainer says something else than the sampler did.

    Args:
        said: [B, T] float32 nats, by the trainer's weights of `version`.
        batch: the rows, and what the sampler recorded.
        version: tokens that other weights have sampled are left out.
    """
    compared = batch.inputs.response_mask & (batch.versions == version)
    # As whole numbers: that is what bits are, and NaN would differ from itself.
    ours = said.detach().contiguous().view(torch.int32)
    theirs = batch.rollout_logprobs.contiguous().view(torch.int32)
    return Comparison(batch, said.detach(), compared, compared & (ours != theirs))


def _differs(found: Comparison, rows: Tensor, *, step: int) -> InvariantError:
    """Name the first token that differs."""
    row, place = found.differs.nonzero()[0].tolist()
    # Of an episode several rows may be read: then they are counted as they are read.
    named = int(rows[row]) if len(rows) == len(found.said) else row
    batch = found.batch
    sampled = float(batch.rollout_logprobs[row, place])
    trained = float(found.said[row, place])
    differing = int(found.differs.sum())
    compared = int(found.compared.sum())
    draw = int(batch.group_ids[row])
    token = int(batch.inputs.tokens[row, place])
    return InvariantError(
        f"run.exact: step {step}, row {named} (draw {draw}), place {place}: of token {token} the "
        f"sampler recorded the log-probability {sampled:.9g}, and the trainer computes "
        f"{trained:.9g} by the same weights. {differing:,} of {compared:,} tokens differ: "
        "something in this run is not exact. Set run.exact: false to go on without the promise, "
        "and report this with the exact.json of a checkpoint"
    )
