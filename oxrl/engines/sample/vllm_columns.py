"""The columns that can be recorded of what vLLM samples, read from what it returns of every token.

Where any is recorded, `vllm_worker._gathered` has vLLM return of a token, in this order: the
sampled one, the rest, and the likeliest. The rest is all but the first `head` of these, as one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any

from oxrl.errors import EngineError
from oxrl.functional.logprobs import NO_CHANCE
from oxrl.tables.columns import CODES, HEAD_IDS, HEAD_LOGPROBS, HEAD_REST, KEPT, Column, Columns
from oxrl.types import Entries, Request, Sampling

# Entries of the tokens that vLLM sampled behind a request's prefix, from its log-probabilities.
Reader = Callable[[Request, Sequence[int], Any, Column], Entries]


def returned_tokens(sampling: Sampling, columns: Columns) -> int:
    """Return how many tokens vLLM is to return beside one that it samples.

    Args:
        sampling: of the request.
        columns: that are recorded.

    Raises:
        EngineError: what is kept has no bound.
    """
    kept = _most_kept(sampling) if KEPT in columns else 0
    likeliest = max(head_size(columns) or 0, kept)
    return 1 + likeliest if likeliest else 0


def head_size(columns: Columns) -> int | None:
    """Return of how many likeliest tokens more is recorded than whether they are kept.

    Args:
        columns: that are recorded; of none None.
    """
    if not columns:
        return None
    return columns[HEAD_IDS].width if HEAD_IDS in columns else 0


def _most_kept(sampling: Sampling) -> int:
    """Return the largest number of tokens that are kept; 0: nothing is cut."""
    if sampling.temperature == 0:
        return 0
    if not sampling.top_k and (sampling.top_p < 1 or sampling.min_p > 0):
        raise EngineError("vLLM tells which tokens are kept where rollout.top_k says how many")
    return sampling.top_k


def _kept(request: Request, tokens: Sequence[int], flat: Any, column: Column) -> Entries:
    """The ids that were not left out, ascending; none where nothing is cut."""
    if not _most_kept(request.sampling):
        return (column.blank,) * len(tokens)
    found: list[bytes] = []
    for likeliest in _likeliest(flat, tokens):
        there = [flat.token_ids[at] for at in likeliest if flat.logprobs[at] > -inf]
        found.append(_packed(column, sorted(there)))
    return tuple(found)


def _head_ids(request: Request, tokens: Sequence[int], flat: Any, column: Column) -> Entries:
    heads = (likeliest[: column.width] for likeliest in _likeliest(flat, tokens))
    return tuple(_entry(column, [flat.token_ids[at] for at in head]) for head in heads)


def _head_logprobs(request: Request, tokens: Sequence[int], flat: Any, column: Column) -> Entries:
    heads = (likeliest[: column.width] for likeliest in _likeliest(flat, tokens))
    return tuple(_entry(column, [_nats(flat.logprobs[at]) for at in head]) for head in heads)


def _head_rest(request: Request, tokens: Sequence[int], flat: Any, column: Column) -> Entries:
    starts = flat.start_indices[: len(tokens)]
    return tuple(_nats(flat.logprobs[start + 1]) for start in starts)


def _likeliest(flat: Any, tokens: Sequence[int]) -> Iterator[range]:
    """Yield where a token's likeliest are: behind itself and the rest."""
    starts = flat.start_indices[: len(tokens)]
    for start, end in zip(starts, flat.end_indices, strict=False):
        yield range(start + 2, end)


def _nats(logprob: float) -> float:
    """JSON has no word for minus infinity."""
    return max(logprob, NO_CHANCE)


def _entry(column: Column, numbers: list[Any]) -> Any:
    return _packed(column, numbers) if column.width > 1 else numbers[0]


def _packed(column: Column, numbers: list[Any]) -> bytes:
    return array(CODES[column.dtype], numbers).tobytes()


# One that is added here is named in the engine's row of `oxrl/tables/engines.py` too.
RETURNED: Mapping[str, Reader] = MappingProxyType(
    {
        KEPT: _kept,
        HEAD_IDS: _head_ids,
        HEAD_LOGPROBS: _head_logprobs,
        HEAD_REST: _head_rest,
    }
)
