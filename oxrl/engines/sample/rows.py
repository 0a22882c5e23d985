"""Rows of tokens that are sampled: their prompts are read whole, then each is decoded in a slot.

Prompts are right-padded and read by the model some at a time (prefill). What a row has sampled and
still needs is in tensors, one entry for each slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from oxrl.engines.sample import TokenRows
from oxrl.engines.sample.gumbel import restrict, sample_tokens
from oxrl.errors import EngineError
from oxrl.functional.logprobs import head_logits
from oxrl.models.network import CausalNetwork
from oxrl.tables.columns import ALWAYS, Column
from oxrl.tables.engines import SAMPLING_ENGINES, SamplingEngineName
from oxrl.types import Ragged, Request, Requests, TokenBatch, TokenIds, TokenRun

# Rows are read at most this many tokens at a time, padding included.
PREFILL_TOKENS = 16384


class Prefilled(NamedTuple):
    """A row that was read: keys and values [layers, 2, heads, T, d], logits [V] after it."""

    kv: Tensor
    logits: Tensor


def prompt_of(request: Request) -> TokenIds:
    """Return the tokens before the first new one: the prompt, and a prefix that is continued."""
    return request.prompt.token_ids + request.prefix.token_ids


class Prompts:
    """The prompts of waiting requests, each read once for all the requests that share it."""

    def __init__(self, network: CausalNetwork) -> None:
        self._network = network
        self._waiting: Counter[TokenIds] = Counter()
        self._prefilled: dict[TokenIds, Prefilled] = {}

    def expect(self, request: Request) -> None:
        """Note that one request more waits for its prompt."""
        self._waiting[prompt_of(request)] += 1

    def forget(self, request: Request) -> None:
        """Note that one request less waits for its prompt; without any the prompt is dropped."""
        prompt = prompt_of(request)
        self._waiting[prompt] -= 1
        if self._waiting[prompt] == 0:
            del self._waiting[prompt]
            self._prefilled.pop(prompt, None)

    def take(self, requests: Requests) -> tuple[list[Prefilled], int]:
        """Return the prompts of requests that wait no longer; read those that were not read yet.

        Returns:
            (the prompt of each request, how many tokens were read).
        """
        wanted = dict.fromkeys(prompt_of(request) for request in requests)
        missing = [prompt for prompt in wanted if prompt not in self._prefilled]
        for batch in row_batches(missing):
            kvs, ends = read_rows(self._network, batch)
            logits = head_logits(ends, self._network.head)
            for prompt, kv, after in zip(batch, kvs, logits, strict=True):
                self._prefilled[prompt] = Prefilled(kv, after)
        taken = [self._prefilled[prompt_of(request)] for request in requests]
        for request in requests:
            self.forget(request)
        return taken, sum(map(len, missing))

    def drop_prefilled(self) -> None:
        """Forget what was read, not who waits: the next `take` reads it again."""
        self._prefilled.clear()


def read_rows(network: CausalNetwork, rows: TokenRows) -> tuple[list[Tensor], Tensor]:
    """Run rows of token ids through the model.

    Returns:
        Keys and values [layers, 2, heads, T, d] of each row, without padding; hidden states
        [P, H] of the rows' last tokens.
    """
    tokens, lengths = pad_rows(rows, network.model.device)
    cache = DynamicCache()
    # Causal attention over right-padded rows needs no mask: what padding computes is never
    # attended to.
    output: Any = network.decoder(input_ids=tokens, past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers
    kv = torch.stack([torch.stack((layer.keys, layer.values)) for layer in layers])
    row = torch.arange(len(rows), device=tokens.device)
    ends = output.last_hidden_state[row, lengths - 1]
    kvs = [kv[:, :, i, :, : len(ids)] for i, ids in enumerate(rows)]
    return kvs, ends


def pad_rows(rows: TokenRows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows of token ids as (right-padded tokens [P, T], lengths [P])."""
    tensors = [torch.tensor(ids, dtype=torch.int64) for ids in rows]
    tokens = pad_sequence(tensors, batch_first=True)
    return tokens.to(device), torch.tensor([len(ids) for ids in rows], device=device)


def batch_of(rows: TokenRows, device: torch.device) -> TokenBatch:
    """Return rows of token ids as a batch of which every token is scored."""
    tokens, lengths = pad_rows(rows, device)
    real = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
    return TokenBatch(tokens=tokens, attention_mask=real, response_mask=real)


def row_batches(
    rows: Sequence[TokenIds], most: int = PREFILL_TOKENS
) -> Iterator[Sequence[TokenIds]]:
    """Consecutive rows whose padded size stays within `most` tokens; a longer row goes alone."""
    start = 0
    longest = 0
    for index, row in enumerate(rows):
        longest = max(longest, len(row))
        padded_size = longest * (index + 1 - start)
        if index > start and padded_size > most:
            yield rows[start:index]
            start = index
            longest = len(row)
    if rows:
        yield rows[start:]


class Recording(NamedTuple):
    """A column, and what fills it.

    record: is called when a token is sampled for each of m slots, with the slots, which of them,
    and the logits [m, V] that these tokens are drawn from: an entry each, [m] or [m, width], or
    m rows of numbers where the column is ragged.
    """

    column: Column
    record: Callable[[Slots, slice, Tensor], Tensor | Ragged]


# What a run records of every token beside its log-probability and version, by name.
Recorded = Mapping[str, Recording]
NOTHING: Recorded = MappingProxyType({})


def check_recorded(name: SamplingEngineName, recorded: Recorded) -> None:
    """Refuse columns that the samplers of a run cannot record.

    Args:
        name: of the engine that samples.
        recorded: what is wanted of it.

    Raises:
        EngineError: it cannot; says who can.
    """
    for column in recorded:
        able = [
            engine
            for engine, row in SAMPLING_ENGINES.items()
            if row.records is None or column in row.records
        ]
        if name not in able:
            raise EngineError(
                f"inference_engine.name is {name}, which cannot record the column {column!r} of "
                f"the tokens that it samples; {', '.join(able)} can"
            )


class Slots:
    """State of the rows being decoded. Active rows lie in slots 0..n-1, without gaps.

    A decode step reads and writes the tensors of all active rows at once, so that no Python runs
    per row. `[rows]` each, entry i for slot i:

        last        int64, the last token, which the next decode step reads
        prompt_end  int64, position of the prompt's last token
        count       int64, tokens of the response so far, a continued prefix included
        limit       int64, most tokens of the response
        seed        int64, of the request
        top_k       int64, 0 keeps all; 0 for greedy rows
        temperature, stochastic, top_p, min_p   float32; 1, 0, 1, 0 for greedy rows, stochastic 1
                    for others

    `stops` [rows, S] int64 holds the stop tokens, filled up with -1. What is sampled is in
    `sampled`, by name: "token_ids" [rows, R] int64, and [rows, R] or [rows, R, width] of every
    column; of a ragged one how many numbers a token has, which are in `lists`. Places of a prefix
    stay empty: what is known of it is in its request.

    Args:
        rows: number of slots.
        recorded: of every token, beside its log-probability and version.
    """

    def __init__(self, rows: int, device: torch.device, recorded: Recorded = NOTHING) -> None:
        self._integers = torch.zeros(rows, 6, dtype=torch.int64, device=device)
        columns = self._integers.unbind(1)
        self.last, self.prompt_end, self.count, self.limit, self.seed, self.top_k = columns
        self._floats = torch.zeros(rows, 4, device=device)
        self.temperature, self.stochastic, self.top_p, self.min_p = self._floats.unbind(1)
        self.stops = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self.sampled = {"token_ids": torch.zeros_like(self.stops)}
        self.lists: dict[str, SlotLists] = {}
        self._recorded = recorded
        further = {name: recording.column for name, recording in recorded.items()}
        for name, column in {**ALWAYS, **further}.items():
            shape = (rows, 0, column.width)[: 2 + (column.width > 1)]
            dtype = getattr(torch, column.dtype)
            if column.ragged:
                from oxrl.engines.sample.lists import SlotLists  # most runs record none

                self.lists[name] = SlotLists(torch.zeros(rows, 0, dtype=dtype, device=device))
                dtype = torch.int32
            self.sampled[name] = torch.zeros(shape, dtype=dtype, device=device)
        self.requests: list[Request] = []
        # Whether any active row is greedy, or samples from a part of the vocabulary only.
        self.greedy = False
        self.restricted = False
        self.min_p_asked = False

    def occupy(self, requests: Requests) -> None:
        """Put `requests` into the next free slots."""
        first = len(self.requests)
        new = slice(first, first + len(requests))
        self._make_room(requests)
        self._integers[new] = self.stops.new_tensor([_integers(request) for request in requests])
        self._floats[new] = self._floats.new_tensor([_floats(request) for request in requests])
        self.stops[new] = -1
        for values in self.lists.values():
            values.count[new] = 0
        for slot, request in enumerate(requests, first):
            sampling = request.sampling
            stops = sampling.stop_token_ids
            self.stops[slot, : len(stops)] = self.stops.new_tensor(stops)
            self.greedy |= sampling.temperature == 0
            self.min_p_asked |= sampling.min_p > 0
            self.restricted |= sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
            self.requests.append(request)

    def sample(self, first: int, logits: Tensor, version: int) -> list[int]:
        """Sample a token for each of the m slots from `first` on.

        Args:
            logits: [m, V], of the slots' next tokens, before any temperature.
            version: of the weights that these are of.

        Returns:
            The slots whose response it ends, by a stop token or by its length.

        Raises:
            EngineError: a recorder gave another shape or dtype than its column has.
        """
        rows = slice(first, first + len(logits))
        count = self.count[rows]
        temperature = self.temperature[rows]
        if self.restricted:
            logits = restrict(
                logits,
                temperature=temperature,
                top_k=self.top_k[rows],
                top_p=self.top_p[rows],
                min_p=self.min_p[rows] if self.min_p_asked else None,
            )
        stochastic = self.stochastic[rows] if self.greedy else None
        tokens, logprobs = sample_tokens(
            logits, self.seed[rows], count, temperature=temperature, stochastic=stochastic
        )
        at = count[:, None]
        sampled = self.sampled
        sampled["token_ids"][rows].scatter_(1, at, tokens[:, None])
        sampled["logprobs"][rows].scatter_(1, at, logprobs[:, None])
        sampled["versions"][rows].scatter_(1, at, version)
        for name, recording in self._recorded.items():
            entries = recording.record(self, rows, logits)
            if isinstance(entries, Ragged):
                entries = self.lists[name].add(rows, entries)
            own = sampled[name][rows]
            here = own[:, 0]
            if (entries.dtype, entries.shape) != (here.dtype, here.shape):
                raise EngineError(
                    f"the recorder of column {name!r} gave {entries.dtype} of {[*entries.shape]}; "
                    f"expected {here.dtype} of {[*here.shape]}"
                )
            own[torch.arange(len(own), device=own.device), count] = entries
        self.last[rows] = tokens
        count += 1
        stopped = (tokens[:, None] == self.stops[rows]).any(1)
        done = stopped | (count >= self.limit[rows])
        if not done.any():
            return []
        return (done.nonzero().squeeze(1) + first).tolist()

    def responses(self, slots: Sequence[int]) -> list[TokenRun]:
        """Return what was sampled in each of `slots`, the prefix that it continues included."""
        chosen = self.count.new_tensor(slots)
        counts = self.count[chosen].tolist()
        longest = max(counts, default=0)
        taken = {name: entries_of(own[chosen, :longest]) for name, own in self.sampled.items()}
        for name, values in self.lists.items():
            for place, slot in enumerate(slots):
                known = len(self.requests[slot].prefix.token_ids)
                counts_of_slot = taken[name][place][known : counts[place]]
                taken[name][place][known:] = values.entries(slot, counts_of_slot)
        further = {name: taken.pop(name) for name in self._recorded}
        found: list[TokenRun] = []
        for place, count in enumerate(counts):
            prefix = self.requests[slots[place]].prefix
            known = len(prefix.token_ids)
            new = TokenRun(
                **{name: tuple(own[place][known:count]) for name, own in taken.items()},
                columns={name: tuple(own[place][known:count]) for name, own in further.items()},
            )
            found.append(prefix.then(new))
        return found

    def contexts(self) -> list[TokenIds]:
        """Return the prompt and the response so far of every active row."""
        responses = self.responses(range(len(self.requests)))
        rows = zip(self.requests, responses, strict=True)
        return [request.prompt.token_ids + response.token_ids for request, response in rows]

    def release(self, ended: Sequence[int]) -> None:
        """Free the slots `ended`; the last active rows move into the gaps, so that none is left."""
        left = len(self.requests) - len(ended)
        targets = [slot for slot in ended if slot < left]
        sources = sorted(set(range(left, len(self.requests))).difference(ended))
        for source, target in zip(sources, targets, strict=True):
            self.requests[target] = self.requests[source]
        if targets:
            self._move(self.stops.new_tensor(sources), self.stops.new_tensor(targets))
        del self.requests[left:]
        if not self.requests:
            self.greedy = False
            self.restricted = False
            self.min_p_asked = False

    def _move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy what is kept of some slots over others, both [m] int64."""
        lists = [tensor for own in self.lists.values() for tensor in (own.values, own.count)]
        for tensor in (self._integers, self._floats, self.stops, *self.sampled.values(), *lists):
            tensor[targets] = tensor[sources]

    def _make_room(self, requests: Requests) -> None:
        """Widen the tensors to the longest response and the most stop tokens of `requests`."""
        response = max(request.sampling.max_tokens for request in requests)
        stops = max(len(request.sampling.stop_token_ids) for request in requests)
        longer = response - self.sampled["token_ids"].shape[1]
        if longer > 0:
            for name, values in self.sampled.items():
                of_width = (0, 0) * (values.ndim - 2)
                self.sampled[name] = pad(values, (*of_width, 0, longer))
        more = stops - self.stops.shape[1]
        if more > 0:
            self.stops = pad(self.stops, (0, more), value=-1)


def entries_of(values: Tensor) -> list[list[Any]]:
    """Entries of a column by rows, from what is recorded of their tokens: [m, n(, width)]."""
    if values.ndim == 2:
        return values.tolist()
    return [[numbers.tobytes() for numbers in row] for row in values.cpu().numpy()]


def _integers(request: Request) -> list[int]:
    """last, prompt_end, count, limit, seed, top_k of a row before its first new token."""
    sampling = request.sampling
    prompt_end = len(request.prompt.token_ids) - 1
    count = len(request.prefix.token_ids)
    top_k = sampling.top_k if sampling.temperature > 0 else 0
    return [0, prompt_end, count, sampling.max_tokens, request.seed, top_k]


def _floats(request: Request) -> list[float]:
    """temperature, stochastic, top_p, min_p of a row."""
    sampling = request.sampling
    if sampling.temperature == 0:
        return [1.0, 0.0, 1.0, 0.0]
    return [sampling.temperature, 1.0, sampling.top_p, sampling.min_p]
