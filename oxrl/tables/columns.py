"""Columns: quantities that are recorded of every token that a policy samples, an entry per token.

A `Column` says all that a quantity needs to get from the sampler to the loss: slots, prefixes,
segments, rows, lines of episodes, batches and packed rows carry whatever a run records, by name.
An entry belongs to the token that was sampled, as a log-probability does: it is what the model had
computed when it had read the tokens before.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Types of numbers -> as `array` calls them.
CODES = {
    "bool": "b",
    "uint8": "B",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "float32": "f",
    "float64": "d",
}


@dataclass(frozen=True)
class Column:
    """A quantity per token.

    dtype: of torch, one of CODES. fill: where nothing is recorded. width: numbers per token; above
    1 an entry is their bytes. ragged: an entry is the bytes of any number of them, of none where
    nothing is recorded.
    """

    dtype: str
    fill: float
    width: int = 1
    ragged: bool = False

    @property
    def blank(self) -> Any:
        """The entry of a token of which nothing is recorded."""
        if self.ragged:
            return b""
        if self.width == 1:
            return self.fill
        return array(CODES[self.dtype], [self.fill] * self.width).tobytes()

    def takes(self, entry: Any) -> bool:
        """True if that is an entry of this column: a number of its type, or as many bytes."""
        if self.ragged:
            size = array(CODES[self.dtype]).itemsize
            return isinstance(entry, bytes) and len(entry) % size == 0
        if self.width > 1:
            return isinstance(entry, bytes) and len(entry) == len(self.blank)
        try:
            array(CODES[self.dtype], [entry])
        except (TypeError, OverflowError):
            return False
        return True


Columns = Mapping[str, Column]
LOGPROBS = Column("float32", 0.0)
VERSIONS = Column("int64", -1)
# Of a token that a cut distribution was sampled from: the ids that were kept, ascending.
KEPT = "kept"
KEPT_IDS = Column("int32", 0, ragged=True)
# Recorded by every sampler.
ALWAYS: Columns = MappingProxyType({"logprobs": LOGPROBS, "versions": VERSIONS})
NOTHING_MORE: Columns = MappingProxyType({})
# What a sampler could have sampled in the place of a token: its likeliest tokens, their
# log-probabilities, and that of all others together.
HEAD_IDS = "head_ids"
HEAD_LOGPROBS = "head_logprobs"
HEAD_REST = "head_rest"


def head_columns(top: int) -> Columns:
    """Return the columns of the `top` likeliest tokens of the sampler.

    Args:
        top: how many tokens.
    """
    return {
        HEAD_IDS: Column("int32", -1, width=top),
        HEAD_LOGPROBS: Column("float32", 0.0, width=top),
        HEAD_REST: Column("float32", 0.0),
    }
