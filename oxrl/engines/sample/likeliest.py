"""The tokens that a sampler could have sampled instead: the likeliest, and the rest.

Log-probabilities are those of the distribution that is sampled from: after the temperature, and
after cuts where there are any, so those of a cut set that is no larger than `top` sum to 1, and
the rest has no chance. That is NO_CHANCE, as JSON has no word for minus infinity.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from oxrl.engines.sample.rows import Recorded, Recording, Slots
from oxrl.errors import EngineError
from oxrl.functional.logprobs import NO_CHANCE, logsumexp_of_rows
from oxrl.tables.columns import HEAD_IDS, HEAD_LOGPROBS, HEAD_REST, head_columns


class Likeliest(NamedTuple):
    """K ids with their logprobs, [m, K], of m tokens that are sampled; of the rest its own, [m]."""

    ids: Tensor
    logprobs: Tensor
    rest: Tensor


def likeliest(logits: Tensor, temperature: Tensor, top: int) -> Likeliest:
    """Find the likeliest tokens of a distribution, and what is left.

    Args:
        logits: [m, V], -inf where nothing may be sampled.
        temperature: [m], positive.
        top: how many tokens.

    Returns:
        int32 ids, most likely first, and float32 nats.

    Raises:
        EngineError: there are not so many tokens.
    """
    vocabulary = logits.shape[1]
    if top > vocabulary:
        raise EngineError(
            f"train.center_top is {top}, and the model has {vocabulary} tokens: set it to "
            f"{vocabulary} or less"
        )
    z = logits / temperature[:, None]
    whole = logsumexp_of_rows(z)
    found = z.topk(top)
    # From the logits of the others: 1 minus the sum is rounding where little is left.
    others = logsumexp_of_rows(z.scatter_(1, found.indices, -torch.inf))
    logprobs = (found.values - whole[:, None]).clamp(min=NO_CHANCE)
    rest = (others - whole).clamp(min=NO_CHANCE)
    return Likeliest(found.indices.to(torch.int32), logprobs.float(), rest.float())


class LikeliestRecorder:
    """Fills the three columns, from one search through the logits of a step.

    Args:
        top: how many tokens, K.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._searched = None
        self._found = None

    def columns(self) -> Recorded:
        """Return what is recorded, by name."""
        columns = head_columns(self._top)
        return {
            HEAD_IDS: Recording(columns[HEAD_IDS], self.ids),
            HEAD_LOGPROBS: Recording(columns[HEAD_LOGPROBS], self.logprobs),
            HEAD_REST: Recording(columns[HEAD_REST], self.rest),
        }

    def ids(self, slots: Slots, rows: slice, logits: Tensor) -> Tensor:
        """See Recording: the likeliest tokens."""
        return self._as_column(self._search(slots, rows, logits).ids)

    def logprobs(self, slots: Slots, rows: slice, logits: Tensor) -> Tensor:
        """See Recording: their log-probabilities."""
        return self._as_column(self._search(slots, rows, logits).logprobs)

    def rest(self, slots: Slots, rows: slice, logits: Tensor) -> Tensor:
        """See Recording: the log-probability of all others together."""
        return self._search(slots, rows, logits).rest

    def _as_column(self, values: Tensor) -> Tensor:
        """[m, K] as a column has it: one number of a token has no axis of its own."""
        return values if self._top > 1 else values[:, 0]

    def _search(self, slots: Slots, rows: slice, logits: Tensor) -> Likeliest:
        if self._found is None or self._searched is None or self._searched() is not logits:
            self._found = likeliest(logits, slots.temperature[rows], self._top)
            self._searched = ref(logits)
        return self._found
