"""Keys and values of the rows being decoded, and attention over them, as transformers wants them.

Every row owns a slot of preallocated memory and has its own length. Active rows lie in slots
0..n-1, so that a decode step reads views and finished rows cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedConfig

GROUPED = "oxrl_grouped"
# Attention spans and capacities are multiples of this many tokens.
SPAN = 32


def rounded(length: int) -> int:
    """`length` up to a multiple of SPAN."""
    return -(-length // SPAN) * SPAN


class RowCache(Cache):
    """Slots of keys and values, and which of their places hold a token.

    `kv` is [layers, 2, rows, heads, capacity, d]; `mask` [rows, capacity] is added to attention
    scores: 0 where a token lies, -inf elsewhere.

    Args:
        rows: number of slots.
        like: keys and values of one row, [layers, 2, heads, T, d].
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        super().__init__(layers=[])
        layers, two, heads, _, width = like.shape
        self.kv = like.new_zeros(layers, two, rows, heads, 0, width)
        self.mask = like.new_zeros(rows, 0)
        self._active = 0
        self._span = 0
        self._places = torch.zeros(0, dtype=torch.int64, device=like.device)

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot."""
        return self.kv.shape[4]

    def reserve(self, length: int) -> None:
        """Make every slot hold at least `length` tokens."""
        if length > self.capacity:
            grown = max(length, self.capacity * 3 // 2)
            extra = rounded(grown) - self.capacity
            self.kv = nn.functional.pad(self.kv, (0, 0, 0, extra))
            self.mask = nn.functional.pad(self.mask, (0, extra), value=-torch.inf)

    def fill(self, slots: slice, prefilled: Tensor) -> None:
        """Copy the keys and values of one row, [layers, 2, heads, T, d], into each of `slots`."""
        length = prefilled.shape[3]
        self.reserve(length)
        self.kv[:, :, slots, :, :length] = prefilled[:, :, None]
        self.mask[slots, :length] = 0.0
        self.mask[slots, length:] = -torch.inf

    def move(self, sources: Tensor, targets: Tensor, longest: int) -> None:
        """Copy slots `sources` [m] over slots `targets` [m], as far as `longest` tokens."""
        moved = self.kv[:, :, sources, :, :longest]
        self.kv[:, :, targets, :, :longest] = moved
        self.mask[targets] = self.mask[sources]

    def begin_step(self, active: int, positions: Tensor, longest: int) -> Tensor:
        """Prepare a decode step of slots 0..active-1, whose new tokens go to `positions`.

        Args:
            positions: [active] int64.
            longest: tokens of the longest row, the new one included.

        Returns:
            The attention mask, [active, 1, 1, span].
        """
        self._active = active
        self._span = min(rounded(longest), self.capacity)
        heads = self.kv.shape[3]
        slots = torch.arange(active * heads, device=self.mask.device)
        self._places = slots * self.capacity + positions.repeat_interleave(heads)
        self.mask[:active].scatter_(1, positions[:, None], 0.0)
        return self.mask[:active, None, None, : self._span]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one new token per active row; returns all that rows attend over, without a copy."""
        keys, values = self.kv[layer_idx]
        width = keys.shape[-1]
        keys.view(-1, width).index_copy_(0, self._places, key_states.reshape(-1, width))
        values.view(-1, width).index_copy_(0, self._places, value_states.reshape(-1, width))
        return keys[: self._active, :, : self._span], values[: self._active, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return a length that nothing depends on, because position ids are always given."""
        return self._span


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token per row, with query heads that share a key head as its queries.

    That needs no repeated copy of the keys and values, which is what costs time in a decode step.
    """
    rows, heads, _, width = query.shape
    shared = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    output = nn.functional.scaled_dot_product_attention(
        shared, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return output.reshape(rows, 1, heads, width), None


AttentionInterface.register(GROUPED, grouped_attention)


@contextmanager
def decoding_attention(config: PreTrainedConfig) -> Iterator[None]:
    """Use `grouped_attention` inside the block, where the model uses transformers' `sdpa`."""
    before = config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    if before == "sdpa":
        config._attn_implementation = GROUPED  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        config._attn_implementation = before  # pyright: ignore[reportPrivateUsage]
