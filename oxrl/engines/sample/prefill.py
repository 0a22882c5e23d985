"""Prefill: whole rows of tokens read by the model at once, right-padded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from oxrl.engines.sample.base import TokenRows
from oxrl.functional.logprobs import head_logits
from oxrl.models.network import CausalNetwork
from oxrl.types import Request, Requests, TokenIds

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

    def read(self, requests: Requests) -> int:
        """Read the prompts that have not been read yet. Returns how many tokens they have."""
        wanted = dict.fromkeys(prompt_of(request) for request in requests)
        missing = [prompt for prompt in wanted if prompt not in self._prefilled]
        for batch in row_batches(missing):
            kvs, ends = read_rows(self._network, batch)
            logits = head_logits(ends, self._network.head)
            for prompt, kv, after in zip(batch, kvs, logits, strict=True):
                self._prefilled[prompt] = Prefilled(kv, after)
        return sum(map(len, missing))

    def __getitem__(self, request: Request) -> Prefilled:
        return self._prefilled[prompt_of(request)]

    def drop_prefilled(self) -> None:
        """Forget what was read, not who waits: the next `read` reads it again."""
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
    lengths = [len(ids) for ids in rows]
    width = max(lengths)
    padded = [[*ids, *[0] * (width - len(ids))] for ids in rows]
    return torch.tensor(padded, device=device), torch.tensor(lengths, device=device)


def row_batches(rows: Sequence[TokenIds]) -> Iterator[Sequence[TokenIds]]:
    """Consecutive rows whose padded size stays within PREFILL_TOKENS; a longer row goes alone."""
    start = 0
    longest = 0
    for index, row in enumerate(rows):
        longest = max(longest, len(row))
        padded_size = longest * (index + 1 - start)
        if index > start and padded_size > PREFILL_TOKENS:
            yield rows[start:index]
            start = index
            longest = len(row)
    if rows:
        yield rows[start:]
