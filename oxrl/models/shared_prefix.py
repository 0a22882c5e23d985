"""A model reads the prompt of a group once, and every response as if the prompt were its own.

Attention is what tells responses apart: the queries of a response see the prompt and what stands
before them in their own response. Everything else in a decoder works on single tokens.

A group of rows is [prompt; response 1; response 2; ...]; groups follow each other in one row,
without padding.

    rows            1 2 3 a b        packed    1 2 3 a b c
                    1 2 3 c                    7 8 d
                    7 8 d
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from oxrl.errors import ConfigError
from oxrl.models.network import CausalNetwork
from oxrl.types import TokenBatch

SHARED = "oxrl_shared_prefix"
# The attention of `oxrl.models.exact`.
EXACT = "oxrl_exact"
LAYOUT = "prefix_layout"
OF_BLOCKS = "prefix_attention"
# Beyond attention as it is everywhere: what the functions here do not compute.
UNKNOWN = ("softcap", "s_aux", "sliding_window")
SDPA = "sdpa"
# As scaled_dot_product_attention of PyTorch.
Attention = Callable[..., Tensor]
# What computes the blocks of a packed row, by what computes attention of plain rows.
BLOCK_ATTENTION: dict[str, Attention] = {SDPA: nn.functional.scaled_dot_product_attention}
# Rows up to so many tokens attend side by side, padded to each other; longer ones group by group.
SIDE_BY_SIDE = 256
# What one more block costs, in pairs of a token and one that it may see, padding included.
BLOCK = 2**17
# Rows are packed where that leaves at most so many of their tokens: fewer saved are not worth it.
PAYS = 0.9


class SharingRefused(ConfigError):
    """A model cannot read the prompt of a group once, or not yet as far as is known here."""


class SharedPrefixNetwork(CausalNetwork):
    """A causal LM that computes rows that begin alike together."""

    def backbone(self, batch: TokenBatch) -> Tensor:
        """See TokenModel."""
        layout: PrefixLayout | None = None
        if batch.position_ids is None and not batch.extras:
            layout = packed(batch)
        if layout is None:
            return super().backbone(batch)
        usual = self.model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
        of_blocks = BLOCK_ATTENTION.get(usual or SDPA, nn.functional.scaled_dot_product_attention)
        with attention_by(self.model.config, SHARED):
            output = self.decoder(
                input_ids=layout.tokens,
                attention_mask=None,
                position_ids=layout.position_ids,
                use_cache=False,
                **{LAYOUT: layout, OF_BLOCKS: of_blocks},
            )
        hidden = output.last_hidden_state[0].index_select(0, layout.places.flatten())
        return hidden.view(*layout.places.shape, -1)


def register_attention(name: str, attention: Attention) -> None:
    """Have the blocks of packed rows computed as plain rows are.

    Args:
        name: of what computes plain rows, as transformers' AttentionInterface knows it.
        attention: as scaled_dot_product_attention of PyTorch; differentiable.
    """
    BLOCK_ATTENTION[name] = attention


@contextmanager
def attention_by(config: PreTrainedConfig, name: str | None) -> Iterator[None]:
    """Have attention computed by another implementation inside the block.

    Args:
        config: of the model.
        name: as transformers' AttentionInterface knows it.
    """
    before = config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    if before == name:
        yield
        return
    config._attn_implementation = name  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        config._attn_implementation = before  # pyright: ignore[reportPrivateUsage]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a packed row, group by group.

    Args:
        query: [1, heads, L, D]. key, value: [1, key heads, L, D].
        attention_mask: none.
        kwargs: the layout, what computes its blocks, and the factor of scores.

    Returns:
        [1, L, heads, D].

    Raises:
        SharingRefused: the model asks for attention of another kind.
    """
    unknown = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if LAYOUT not in kwargs:
        unknown.append("no positions of shared prefixes")
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if unknown:
        what = ", ".join(unknown)
        raise SharingRefused(
            f"train.share_prefix: the model's attention has {what}; set it to false"
        )
    layout: PrefixLayout = kwargs[LAYOUT]
    scale = kwargs.get("scaling")
    heads = query.shape[1]
    repeats = heads // key.shape[1]
    # [L, heads, D], so that a token is one piece of memory.
    queries = query[0].transpose(0, 1)
    keys = key.repeat_interleave(repeats, dim=1)[0].transpose(0, 1)
    values = value.repeat_interleave(repeats, dim=1)[0].transpose(0, 1)
    found: list[Tensor] = []
    for block in layout.blocks:
        found += _attend_block(block, queries, keys, values, scale, kwargs[OF_BLOCKS])
    return torch.cat(found).index_select(0, layout.answers)[None], None


def _attend_block(
    block: Block,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    attention: Attention,
) -> list[Tensor]:
    """Compute the attention of one block of groups.

    Args:
        queries, keys, values: [L, heads, D] of the packed row.
        scale: factor of scores.
        attention: what computes them.

    Returns:
        [tokens, heads, D] each: of all prompts, if there are any, then of all responses, both with
        their padding.
    """
    found: list[Tensor] = []
    if block.prompts.numel():
        of_prompts = attention(
            _taken(queries, block.prompts),
            _taken(keys, block.prompts),
            _taken(values, block.prompts),
            is_causal=True,
            scale=scale,
        )
        found.append(of_prompts.transpose(1, 2).flatten(0, 1))
    of_responses = attention(
        _taken(queries, block.responses),
        _taken(keys, block.rows),
        _taken(values, block.rows),
        attn_mask=block.sees,
        scale=scale,
    )
    found.append(of_responses.transpose(1, 2).flatten(0, 1))
    return found


def _taken(tokens: Tensor, places: Tensor) -> Tensor:
    """[B, heads, T, D] of tokens [L, heads, D] at places [B, T]."""
    taken = tokens.index_select(0, places.flatten())
    return taken.view(*places.shape, *tokens.shape[1:]).transpose(1, 2)


AttentionInterface.register(SHARED, attend)


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
    sources: [L], of every token of the packed row its place among the batch's, flattened.
    places: [B, T] of every token of the batch, in the packed row; padding is anywhere.
    blocks: what attends side by side. answers: [L], the index of every token in the outputs of the
    blocks, which are joined one after the other, in each the prompts and then the responses; rows
    of a group may be in several blocks.
    """

    groups: tuple[Group, ...]
    tokens: Tensor
    position_ids: Tensor
    sources: Tensor
    places: Tensor
    blocks: tuple[Block, ...]
    answers: Tensor


def groups_of(batch: TokenBatch) -> list[Group]:
    """The rows of a batch by what they begin with, in the order of their first rows.

    A row begins with its tokens before the first that is trained on, all of them where none is, but
    for the last one, so that a response is never empty.
    """
    real = batch.attention_mask.sum(1)
    trained = batch.response_mask
    first = torch.where(trained.any(1), trained.int().argmax(1), real)
    prompts = torch.minimum(first, real - 1).clamp(min=0).tolist()
    lengths = real.tolist()
    found: dict[tuple[int, ...], list[int]] = {}
    tokens = batch.tokens.tolist()
    for row, length in enumerate(prompts):
        found.setdefault(tuple(tokens[row][:length]), []).append(row)
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
        sources=(rows[:, None] * batch.tokens.shape[1] + at)[own],
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


def cheapest_cut(lengths: Sequence[int], *, most: int, price: int) -> list[int]:
    """Rows of every piece, so that the sum over pieces of `rows x longest + price` is least.

    Where two cuts cost the same, earlier pieces are larger. By dynamic programming from the end.

    Args:
        lengths: of the rows, the longest first.
        most: tokens of a piece, padding included; a longer row is a piece of its own.
        price: of a piece, in tokens.
    """
    count = len(lengths)
    if count and lengths[0] * count <= most and lengths[0] * count - sum(lengths) <= price:
        return [count]
    costs = torch.zeros(count + 1, dtype=torch.int64)
    every = torch.arange(1, count + 1)
    taken = [0] * count
    for first in range(count - 1, -1, -1):
        length = lengths[first]
        fitting = min(count - first, max(1, most // length))
        rows = every[:fitting]
        found = length * rows + costs[first + 1 : first + 1 + fitting]
        # Of equal costs that with the most rows.
        best = int((found * (count + 1) - rows).argmin())
        taken[first] = best + 1
        costs[first] = found[best] + price
    pieces: list[int] = []
    first = 0
    while first < count:
        pieces.append(taken[first])
        first += pieces[-1]
    return pieces
