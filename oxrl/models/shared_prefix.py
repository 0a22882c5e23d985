"""A model reads the prompt of a group once, and every response as if the prompt were its own.

Attention is what tells responses apart: the queries of a response see the prompt and what stands
before them in their own response. Everything else in a decoder works on single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from oxrl.data.token_rows import to_token_batch
from oxrl.errors import ConfigError
from oxrl.models.network import CausalNetwork
from oxrl.models.prefix_layout import Block, PrefixLayout, packed
from oxrl.types import TokenBatch

SHARED = "oxrl_shared_prefix"
LAYOUT = "prefix_layout"
# Beyond attention as it is everywhere: what the functions here do not compute.
UNKNOWN = ("softcap", "s_aux", "sliding_window")
# Largest difference of hidden states, relative to the largest of them.
TOLERANCE = 1e-4
LOW_PRECISION_TOLERANCE = 3e-2


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
        with attention_by(self.model.config, SHARED):
            output = self.decoder(
                input_ids=layout.tokens,
                attention_mask=None,
                position_ids=layout.position_ids,
                use_cache=False,
                **{LAYOUT: layout},
            )
        hidden = output.last_hidden_state[0].index_select(0, layout.places.flatten())
        return hidden.view(*layout.places.shape, -1)


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
        kwargs: the layout, and the factor of scores.

    Returns:
        [1, L, heads, D].

    Raises:
        SharingRefused: the model asks for attention of another kind.
    """
    unknown = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if LAYOUT not in kwargs:
        unknown.append("no word of how rows are laid out")
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if unknown:
        what = ", ".join(unknown)
        raise SharingRefused(
            f"train.share_prefix: the model's attention has {what}; set it to false"
        )
    layout: PrefixLayout = kwargs[LAYOUT]
    scale: float | None = kwargs.get("scaling")
    heads = query.shape[1]
    repeats = heads // key.shape[1]
    # [L, heads, D], so that a token is one piece of memory.
    queries = query[0].transpose(0, 1)
    keys = key.repeat_interleave(repeats, dim=1)[0].transpose(0, 1)
    values = value.repeat_interleave(repeats, dim=1)[0].transpose(0, 1)
    found: list[Tensor] = []
    for block in layout.blocks:
        found += _attend_block(block, queries, keys, values, scale)
    return torch.cat(found).index_select(0, layout.answers)[None], None


def _attend_block(
    block: Block, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None
) -> list[Tensor]:
    """Compute the attention of one block of groups.

    Args:
        queries, keys, values: [L, heads, D] of the packed row.

    Returns:
        [tokens, heads, D] each: of all prompts, if there are any, then of all responses, both with
        their padding.
    """
    attention = nn.functional.scaled_dot_product_attention
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


def trial_rows() -> TokenBatch:
    """Groups of several, of one, without a prompt, and of a prompt of one token."""
    groups = [(7, (5, 2, 9)), (3, (4,)), (0, (6, 6)), (1, (3, 8))]
    rows: list[list[int]] = []
    trained: list[list[bool]] = []
    for number, (prompt, responses) in enumerate(groups):
        begin = [2 + (5 * number + 3 * at) % 31 for at in range(prompt)]
        for sample, length in enumerate(responses):
            rest = [2 + (11 * number + 7 * sample + 13 * at) % 59 for at in range(length)]
            rows.append(begin + rest)
            trained.append([False] * prompt + [True] * length)
    return to_token_batch(rows, trained, 0)


@torch.no_grad()
def check_sharing(model: PreTrainedModel) -> None:
    """Make sure that rows computed together are what they are one by one.

    Raises:
        SharingRefused: they are not: the model carries something from token to token that is not
            attention, or attends in a way that is not known here.
    """
    network = CausalNetwork(model)
    batch = trial_rows().to(model.device)
    real = batch.attention_mask
    plain = network.backbone(batch)[real].float()
    try:
        shared = SharedPrefixNetwork(model).backbone(batch)[real].float()
    except TypeError as error:
        raise SharingRefused(
            f"train.share_prefix: {type(model).__name__} does not hand the layout of a row to its "
            f"attention ({error}); set it to false"
        ) from error
    difference = float((plain - shared).abs().max() / plain.abs().max())
    low = next(model.parameters()).dtype != torch.float32
    limit = LOW_PRECISION_TOLERANCE if low else TOLERANCE
    if difference > limit:
        raise SharingRefused(
            f"train.share_prefix: hidden states of {type(model).__name__} differ by "
            f"{difference:.2g} of the largest when the prompt of a group is read once, above "
            f"{limit:g}; set it to false"
        )
