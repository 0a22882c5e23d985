"""Rows that begin alike, laid out so that what they share stands there once, without padding.

A group of rows is [prompt; response 1; response 2; ...]; groups follow each other in one row.

    rows            1 2 3 a b        packed    1 2 3 a b c
                    1 2 3 c                    7 8 d
                    7 8 d
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.functional.cuts import cheapest_cut
from oxrl.types import TokenBatch

# Rows up to so many tokens attend side by side, padded to each other; longer ones group by group.
SIDE_BY_SIDE = 256
# What one more block costs, in pairs of a token and one that it may see, padding included.
BLOCK = 2**17
# Rows are packed where that leaves at most so many of their tokens: fewer saved are not worth it.
PAYS = 0.9


class Group(NamedTuple):
    """Rows with one prompt.

    rows: of the batch. prompt: its tokens. tokens: that the model reads, the prompt once and all
    that follows it.
    """

    rows: list[int]
    prompt: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """Groups that attend side by side: P tokens the longest prompt, R response, T row.

    prompts: [G, P] places of the tokens of every prompt. responses: [B, R] of every response.
    rows: [B, T] of all that a response may see. sees: [1 or B, 1, R, T], which of it. Places are
    those of the packed row; behind an end they are any.
    """

    prompts: Tensor
    responses: Tensor
    rows: Tensor
    sees: Tensor


@dataclass(frozen=True, kw_only=True)
class PrefixLayout:
    """The packed row of a batch, and the place of every token in it.

    groups: in the order in which they stand. tokens, position_ids: [1, L] of the packed row.
    places: [B, T] of every token of the batch, in the packed row; padding is anywhere.
    blocks: what attends side by side. answers: [L], the index of every token in the outputs of the
    blocks, which are joined one after the other, in each the prompts and then the responses; rows
    of a group may be in several blocks.
    """

    groups: tuple[Group, ...]
    tokens: Tensor
    position_ids: Tensor
    places: Tensor
    blocks: tuple[Block, ...]
    answers: Tensor


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
        responses = sum(lengths[row] - len(prompt) for row in rows)
        groups.append(Group(rows, len(prompt), len(prompt) + responses))
    return groups


def packed(batch: TokenBatch) -> PrefixLayout | None:
    """The packed row of a batch; None where its rows have too little in common."""
    groups = groups_of(batch)
    if not worth_packing(groups, batch.tokens.numel()):
        return None
    return laid_out(batch, groups)


def worth_packing(groups: Sequence[Group], padded: int) -> bool:
    """True if groups are read as one packed row: that saves enough tokens.

    Args:
        groups: of a batch. padded: its tokens as rows, padding included.
    """
    return sum(group.tokens for group in groups) <= PAYS * padded


def laid_out(batch: TokenBatch, groups: Sequence[Group]) -> PrefixLayout:
    """The packed row of all groups of a batch.

    Args:
        groups: every row of the batch is in one of them.
    """
    device = batch.tokens.device
    counts = [len(group.rows) for group in groups]
    rows = torch.tensor([row for group in groups for row in group.rows], device=device)
    # Of every row, in the order in which they stand: its group, the group's first, its prompt.
    group = torch.arange(len(groups), device=device).repeat_interleave(
        torch.tensor(counts, device=device)
    )
    first = torch.searchsorted(group, group)
    prompt = torch.tensor([found.prompt for found in groups], device=device)[group]
    at = torch.arange(batch.tokens.shape[1], device=device).expand(len(rows), -1)
    in_prompt = at < prompt[:, None]
    leads = first == torch.arange(len(rows), device=device)
    # What stands in the packed row on a row's account: its response, and its prompt if it leads.
    own = batch.attention_mask[rows] & (~in_prompt | leads[:, None])
    standing = (own.flatten().cumsum(0) - 1).view_as(at)
    placed = torch.where(in_prompt, standing[first], standing).clamp(min=0)
    places = torch.empty_like(placed)
    places[rows] = placed
    blocks: list[Block] = []
    answers = torch.empty(int(own.sum()), dtype=torch.int64, device=device)
    given = 0
    lengths = batch.attention_mask[rows].sum(1).tolist()
    for chosen in _blocks(counts, lengths):
        here = torch.tensor(chosen, device=device)
        block = _block(placed[here], prompt[here], own[here], leads[here])
        number = leads[here].cumsum(0) - 1
        answers[standing[here][own[here]]] = given + _answers(
            block, prompt[here], own[here], number
        )
        given += block.prompts.numel() + block.responses.numel()
        blocks.append(block)
    return PrefixLayout(
        groups=tuple(groups),
        tokens=batch.tokens[rows][own][None],
        position_ids=at[own][None],
        places=places,
        blocks=tuple(blocks),
        answers=answers,
    )


def _blocks(counts: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """The rows of every block: of about one length, where padding costs more than another block.

    Args:
        counts: rows of every group. lengths: tokens of every row.
    """
    begin = 0
    for count in [len(lengths)] if max(lengths) <= SIDE_BY_SIDE else counts:
        rows = sorted(range(begin, begin + count), key=lambda row: -lengths[row])
        squares = [lengths[row] ** 2 for row in rows]
        first = 0
        for piece in cheapest_cut(squares, most=sum(squares) * len(rows), price=BLOCK):
            yield sorted(rows[first : first + piece])
            first += piece
        begin += count


def _block(placed: Tensor, prompt: Tensor, own: Tensor, leads: Tensor) -> Block:
    """Some groups as a block.

    Args:
        placed: [B, T] places of their rows. prompt: [B] tokens of the rows' prompts. own: [B, T],
            what stands in the packed row on a row's account. leads: [B], first rows of groups,
            whose prompts are read here.
    """
    rest = own.sum(1) - prompt * leads
    longest = int((prompt + rest).max())
    behind = torch.arange(int(rest.max()), device=placed.device)
    at = prompt[:, None] + behind
    longest_prompt = int((prompt * leads).max())
    known = prompt[:1] if bool((prompt == prompt[0]).all()) else prompt
    last_seen = known[:, None, None, None] + behind[:, None]
    return Block(
        prompts=placed[leads, :longest_prompt],
        responses=placed.gather(1, at.clamp(max=placed.shape[1] - 1)),
        rows=placed[:, :longest],
        sees=torch.arange(longest, device=placed.device) <= last_seen,
    )


def _answers(block: Block, prompt: Tensor, own: Tensor, group: Tensor) -> Tensor:
    """The index of every token of a block in the block's outputs, prompts first.

    Args:
        prompt, own: as of `_block`. group: [B] of every row, counted from 0.
    """
    longest_prompt = block.prompts.shape[1]
    count, longest_response = block.responses.shape
    at = torch.arange(own.shape[1], device=own.device).expand_as(own)
    in_prompt = group[:, None] * longest_prompt + at
    row = torch.arange(count, device=own.device)[:, None]
    in_response = block.prompts.numel() + row * longest_response + at - prompt[:, None]
    return torch.where(at < prompt[:, None], in_prompt, in_response)[own]
