"""A float64 token model without internal casts, and random batches, for the engine tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oxrl.functional.logprobs import Head
from oxrl.types import PolicyBatch, SupervisedBatch, TokenBatch, ValueBatch

VOCABULARY, WIDTH = 13, 6


class AttentionModel(nn.Module):
    """One causal attention layer; logits, or values when `outputs` is 1."""

    def __init__(self, outputs: int = VOCABULARY) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5)

        self.embedding = weight(VOCABULARY, WIDTH)
        self.positions = weight(64, WIDTH)
        self.query_key_value = weight(3 * WIDTH, WIDTH)
        self.output = weight(outputs, WIDTH)
        self.bias = weight(outputs)

    @property
    def head(self) -> Head:
        return Head(self.output, self.bias)

    def backbone(self, batch: TokenBatch) -> Tensor:
        tokens = batch.tokens
        x = self.embedding[tokens] + self.positions[: tokens.shape[1]]
        q, k, v = (x @ self.query_key_value.t()).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(
            torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool(), -torch.inf
        )
        return torch.tanh(x + scores.softmax(-1) @ v)


def token_batch(
    lengths: list[tuple[int, int]], *, extra: int = 0, vocabulary: int = VOCABULARY
) -> TokenBatch:
    """Rows of (prompt, response) lengths; `extra` columns of padding filled with random valid
    ids.
    """
    generator = torch.Generator().manual_seed(5)
    width = max(prompt + response for prompt, response in lengths)
    tokens = torch.randint(0, vocabulary, (len(lengths), width), generator=generator)
    filler = torch.randint(
        0, vocabulary, (len(lengths), extra), generator=torch.Generator().manual_seed(6)
    )
    tokens = torch.cat([tokens, filler], 1)
    column = torch.arange(width + extra)
    prompts = torch.tensor([prompt for prompt, _ in lengths])[:, None]
    ends = torch.tensor([prompt + response for prompt, response in lengths])[:, None]
    return TokenBatch(
        tokens=tokens,
        attention_mask=column < ends,
        response_mask=(column >= prompts) & (column < ends),
    )


def _field(
    inputs: TokenBatch, seed: int, extra: int, *, dtype: torch.dtype, poison: bool
) -> Tensor:
    rows, width = inputs.tokens.shape
    values = torch.randn(
        rows, width - extra, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    values = torch.nn.functional.pad(values, (0, extra)).to(dtype)
    return (
        values.masked_fill(~inputs.response_mask, torch.nan)
        if poison
        else values * inputs.response_mask
    )


def batches(
    lengths: list[tuple[int, int]],
    *,
    extra: int = 0,
    dtype: torch.dtype = torch.float64,
    vocabulary: int = VOCABULARY,
    poison: bool = False,
) -> dict[str, PolicyBatch | ValueBatch | SupervisedBatch]:
    """The same random problem for each loss; `poison` fills every float field with NaN outside the
    mask.
    """
    inputs = token_batch(lengths, extra=extra, vocabulary=vocabulary)

    def field(seed: int) -> Tensor:
        return _field(inputs, seed, extra, dtype=dtype, poison=poison)

    weights = (field(1).abs() + 0.1) / len(lengths)
    weights = weights if poison else weights * inputs.response_mask
    policy = PolicyBatch(
        inputs=inputs,
        old_logprobs=field(2) * 0.1 - 2.5,
        rollout_logprobs=field(2) * 0.1 - 2.5,
        ref_logprobs=None,
        advantages=field(3),
        loss_weights=weights,
        versions=torch.zeros_like(inputs.tokens),
        group_ids=torch.arange(len(lengths)),
    )
    value = ValueBatch(inputs=inputs, old_values=field(4), returns=field(5), loss_weights=weights)
    return {
        "policy": policy,
        "value": value,
        "supervised": SupervisedBatch(inputs=inputs, loss_weights=weights),
    }
