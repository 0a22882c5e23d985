"""Rows that begin alike, laid out so that what they share stands there once.

A group of rows is [prompt; response 1; response 2; ...], its responses padded to the longest of
them; the groups of a micro-batch follow each other in one row.

    rows            1 2 3 a b        packed    1 2 3 a b c .
                    1 2 3 c
                    7 8 d                      7 8 d
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.types import TokenBatch


class Group(NamedTuple):
    """Rows with one prompt.

    rows: of the batch. prompt: its tokens. longest: tokens of the longest response.
    """

    rows: list[int]
    prompt: int
    longest: int

    @property
    def tokens(self) -> int:
        """That the model reads, padding included."""
        return self.prompt + len(self.rows) * self.longest


@dataclass(frozen=True, kw_only=True)
class PrefixLayout:
    """Where everything is.

    groups: in the order in which they stand. tokens, position_ids: [1, L] of the packed row.
    places: [B, T] of every token of the batch, in the packed row; padding is anywhere.
    """

    groups: tuple[Group, ...]
    tokens: Tensor
    position_ids: Tensor
    places: Tensor


def prompt_lengths(batch: TokenBatch) -> list[int]:
    """Tokens of each row before the first that is trained on; all of them where none is.

    The last token is never part of it, so that a response is never empty.
    """
    lengths = batch.attention_mask.sum(1)
    trained = batch.response_mask
    first = torch.where(trained.any(1), trained.int().argmax(1), lengths)
    return torch.minimum(first, lengths - 1).clamp(min=0).tolist()


def groups_of(batch: TokenBatch) -> list[Group]:
    """The rows of a batch by what they begin with, in the order of their first rows."""
    lengths = batch.lengths()
    found: dict[tuple[int, ...], list[int]] = {}
    tokens = batch.tokens.tolist()
    for row, prompt in enumerate(prompt_lengths(batch)):
        found.setdefault(tuple(tokens[row][:prompt]), []).append(row)
    groups: list[Group] = []
    for prompt, rows in found.items():
        longest = max(lengths[row] - len(prompt) for row in rows)
        groups.append(Group(rows, len(prompt), longest))
    return groups


def laid_out(batch: TokenBatch, groups: Sequence[Group]) -> PrefixLayout:
    """The packed row of all groups of a batch.

    Args:
        groups: every row of the batch is in one of them.
    """
    rows, length = batch.tokens.shape
    total = sum(group.tokens for group in groups)
    device = batch.tokens.device
    tokens = torch.zeros(total, dtype=torch.int64, device=device)
    positions = torch.zeros_like(tokens)
    places = torch.zeros(rows, length, dtype=torch.int64, device=device)
    start = 0
    for group in groups:
        prompt = group.prompt
        here = torch.arange(start, start + prompt, device=device)
        tokens[here] = batch.tokens[group.rows[0], :prompt]
        positions[here] = here - start
        start += prompt
        for row in group.rows:
            # As far as the batch is wide; the longest response need not be that of this row.
            seen = min(group.longest, length - prompt)
            response = torch.arange(start, start + seen, device=device)
            tokens[response] = batch.tokens[row, prompt : prompt + seen]
            places[row, :prompt] = here
            places[row, prompt : prompt + seen] = response
            following = torch.arange(start, start + group.longest, device=device)
            positions[following] = following - start + prompt
            start += group.longest
    return PrefixLayout(
        groups=tuple(groups),
        tokens=tokens[None],
        position_ids=positions[None],
        places=places,
    )
