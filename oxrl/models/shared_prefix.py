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

from oxrl.errors import ConfigError
from oxrl.functional.logprobs import Head
from oxrl.models.network import CausalNetwork
from oxrl.models.prefix_layout import Group, PrefixLayout, groups_of, laid_out
from oxrl.types import TokenBatch

SHARED = "oxrl_shared_prefix"
LAYOUT = "prefix_layout"
# Beyond attention as it is everywhere: what the functions here do not compute.
UNKNOWN = ("softcap", "s_aux", "sliding_window")
# Largest difference of hidden states, relative to the largest of them.
TOLERANCE = 1e-4
LOW_PRECISION_TOLERANCE = 3e-2


class SharedPrefixNetwork:
    """A TokenModel that computes rows that begin alike together.

    Args:
        network: the same model, row by row.
    """

    def __init__(self, network: CausalNetwork) -> None:
        self._network = network

    @property
    def head(self) -> Head:
        return self._network.head

    def backbone(self, batch: TokenBatch) -> Tensor:
        """See TokenModel."""
        if batch.position_ids is not None or batch.extras:
            return self._network.backbone(batch)
        groups = groups_of(batch)
        if len(groups) == len(batch):
            return self._network.backbone(batch)
        layout = laid_out(batch, groups)
        decoder = self._network.decoder
        with shared_attention(self._network.model.config):
            output = decoder(
                input_ids=layout.tokens,
                attention_mask=None,
                position_ids=layout.position_ids,
                use_cache=False,
                **{LAYOUT: layout},
            )
        return output.last_hidden_state[0][layout.places]


@contextmanager
def shared_attention(config: PreTrainedConfig) -> Iterator[None]:
    """Use `attend` inside the block."""
    before = config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    config._attn_implementation = SHARED  # pyright: ignore[reportPrivateUsage]
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
        ConfigError: the model asks for attention of another kind.
    """
    unknown = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if LAYOUT not in kwargs:
        unknown.append("no word of how rows are laid out")
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if unknown:
        what = ", ".join(unknown)
        raise ConfigError(f"train.share_prefix: the model's attention has {what}; set it to false")
    layout: PrefixLayout = kwargs[LAYOUT]
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, dim=1)
    value = value.repeat_interleave(repeats, dim=1)
    pieces: list[Tensor] = []
    start = 0
    for group in layout.groups:
        here = slice(start, start + group.tokens)
        pieces += _attend_group(
            query[:, :, here], key[:, :, here], value[:, :, here], group, kwargs.get("scaling")
        )
        start += group.tokens
    return torch.cat(pieces, dim=2).transpose(1, 2), None


def _attend_group(
    query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float | None
) -> list[Tensor]:
    """Of one group, [1, heads, tokens, D]: the prompt, then all responses."""
    attention = nn.functional.scaled_dot_product_attention
    count = len(group.rows)
    if count == 1:
        return [attention(query, key, value, is_causal=True, scale=scale)]
    prompt = group.prompt
    longest = group.longest
    found: list[Tensor] = []
    if prompt:
        found.append(
            attention(
                query[:, :, :prompt],
                key[:, :, :prompt],
                value[:, :, :prompt],
                is_causal=True,
                scale=scale,
            )
        )

    def responses(tensor: Tensor) -> Tensor:
        """[1, heads, prompt + n * longest, D] to [n, heads, longest, D]."""
        _, heads, _, width = tensor.shape
        own = tensor[0, :, prompt:].reshape(heads, count, longest, width)
        return own.transpose(0, 1)

    def behind_prompt(tensor: Tensor) -> Tensor:
        shared = tensor[:, :, :prompt].expand(count, -1, -1, -1)
        return torch.cat([shared, responses(tensor)], dim=2)

    sees = torch.ones(longest, prompt + longest, dtype=torch.bool, device=query.device)
    answered = attention(
        responses(query),
        behind_prompt(key),
        behind_prompt(value),
        attn_mask=sees.tril(prompt),
        scale=scale,
    )
    heads, width = query.shape[1], query.shape[3]
    found.append(answered.transpose(0, 1).reshape(1, heads, count * longest, width))
    return found


AttentionInterface.register(SHARED, attend)


@torch.no_grad()
def check_sharing(model: PreTrainedModel) -> None:
    """Make sure that rows computed together are what they are one by one.

    Raises:
        ConfigError: they are not: the model carries something from token to token that is not
            attention, or attends in a way that is not known here.
    """
    network = CausalNetwork(model)
    rows = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 0], [7, 8, 9, 9, 9]], device=model.device)
    real = torch.ones_like(rows, dtype=torch.bool)
    real[1, 4] = False
    trained = real.clone()
    trained[:, :3] = False
    batch = TokenBatch(tokens=rows, attention_mask=real, response_mask=trained)
    plain = network.backbone(batch)[real].float()
    try:
        shared = SharedPrefixNetwork(network).backbone(batch)[real].float()
    except TypeError as error:
        raise ConfigError(
            f"train.share_prefix: {type(model).__name__} does not hand the layout of a row to its "
            f"attention ({error}); set it to false"
        ) from error
    difference = float((plain - shared).abs().max() / plain.abs().max())
    low = next(model.parameters()).dtype != torch.float32
    limit = LOW_PRECISION_TOLERANCE if low else TOLERANCE
    if difference > limit:
        raise ConfigError(
            f"train.share_prefix: hidden states of {type(model).__name__} differ by "
            f"{difference:.2g} of the largest when the prompt of a group is read once, above "
            f"{limit:g}; set it to false"
        )
