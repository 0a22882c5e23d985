"""Models as engines call them, hidden states and a head, and their outputs for a micro-batch.

Any module with `backbone` and `head` will do.
"""

from __future__ import annotations

from typing import Any, Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oxrl.errors import DataError, EngineError
from oxrl.functional.logprobs import (
    Head,
    bootstrap_positions,
    head_logits,
    head_of_batch,
    predicted_positions,
    spread,
)
from oxrl.functional.masks import at_least_float32
from oxrl.modelfiles.folder import family_of
from oxrl.models.meta_init import home_of, weights_later
from oxrl.models.token_mask import excluded
from oxrl.tables.columns import KEPT
from oxrl.types import CANDIDATES, Output, TokenBatch, Want

TOP_K = "top_k="
# Rotary positions that transformers computes anew by the longest row of every batch.
CHANGING_ROTATIONS = ("dynamic", "longrope")
# Models whose own logits were compared with ours.
_COMPARED = WeakSet[PreTrainedModel]()


class TokenModel(Protocol):
    """The only thing engines call. A Hugging Face causal LM is wrapped by `token_model`.

    `head` turns hidden states into logits (weight [V, H]) or values (weight [1, H]).
    """

    @property
    def head(self) -> Head: ...

    def backbone(self, batch: TokenBatch) -> Tensor:
        """Hidden states [B, T, H] of a batch of tokens [B, T].

        It reads the whole batch: tokens, positions, and of `extras` what it knows.
        """
        ...


class CausalNetwork:
    """A Hugging Face causal LM as a TokenModel: its backbone, and the numbers of its head."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.decoder = model.base_model
        fix_rotations(model)
        output = model.get_output_embeddings()
        if output is None or self.decoder is model:
            raise EngineError(
                f"{type(model).__name__} has no separate output head; "
                "a causal language model is needed"
            )
        self._output: nn.Module = output
        config = model.config.get_text_config()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies logits, Granite divides them.
        factor = float(getattr(config, "logit_scale", None) or 1.0)
        divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        self._scale = factor / divisor
        vocabulary = cast(Tensor, output.weight).shape[0]
        self._never = excluded(model, vocabulary)
        if weights_later(model) is None and model not in _COMPARED:
            self._check_head()
            _COMPARED.add(model)

    @property
    def head(self) -> Head:
        weight = cast(Tensor, self._output.weight)
        bias = getattr(self._output, "bias", None)
        # A linear layer that does not multiply as PyTorch's does says how it does.
        linear = getattr(self._output, "product", nn.functional.linear)
        return Head(weight, bias, self._softcap, self._scale, self._never, linear)

    def backbone(self, batch: TokenBatch) -> Tensor:
        """See TokenModel."""
        return _last_hidden(self.decoder, batch)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare with the model's own logits once: an unknown post-processing must be noticed."""
        tokens = torch.tensor([[1, 2, 3]], device=self.model.device)
        # Their logits have those of tokens that are never sampled too.
        ours = head_logits(self.backbone(unpadded(tokens))[0], self.head._replace(never=None))
        theirs = self.model(input_ids=tokens, use_cache=False).logits[0]
        if not torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2, equal_nan=True):
            raise EngineError(
                f"{type(self.model).__name__} computes its logits in a way oxRL does not know: "
                "hidden states times the output embedding give other numbers than the model's own "
                "forward"
            )


def fix_rotations(model: nn.Module, longest: int | None = None) -> None:
    """Rotate tokens always as in the longest row, whatever else is in a batch or was read before.

    What a model says of a row would otherwise depend on the rows beside it.

    Args:
        model: changed in place; only the first call does anything.
        longest: tokens of the longest row that is ever read; None: what the model's configuration
            allows.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) in CHANGING_ROTATIONS:
            rotary: Any = module
            last = (longest or rotary.config.max_position_embeddings) - 1
            rotary(rotary.inv_freq, torch.tensor([[last]], device=rotary.inv_freq.device))
            rotary.rope_type = "fixed"


class ValueModel(nn.Module):
    """A critic: a Hugging Face backbone and a linear head to one number, zero at the start."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        super().__init__()
        self.decoder = decoder
        weight = next(decoder.parameters())
        width = decoder.config.get_text_config().hidden_size
        self.value_head = nn.Linear(width, 1, device=home_of(decoder), dtype=weight.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        # What the head was trained on: a number per reply ("outcome"), or per step ("process").
        # Kept in its file.
        self.kind = "outcome"

    @property
    def head(self) -> Head:
        return Head(self.value_head.weight, self.value_head.bias)

    def backbone(self, batch: TokenBatch) -> Tensor:
        """See TokenModel."""
        return _last_hidden(self.decoder, batch)


def read_tokens(
    network: TokenModel, inputs: TokenBatch, want: Want, *, temperature: float
) -> Output:
    """Run a network on one micro-batch; differentiable.

    Args:
        network: the model.
        inputs: [B, T] tokens, right-padded.
        want: which fields of `Output` to compute.
        temperature: logits are divided by it.

    Returns:
        Token-aligned fields, 0.0 wherever `response_mask` is False: the head runs nowhere else.

    Raises:
        EngineError: `want` has values, and the network has no value head.
    """
    hidden = network.backbone(inputs).flatten(0, 1)
    if "values" in want:
        return _read_values(network, inputs, hidden)
    top_k = [int(field.removeprefix(TOP_K)) for field in want if field.startswith(TOP_K)]
    fields = head_of_batch(
        hidden,
        network.head,
        inputs.tokens,
        inputs.response_mask,
        temperature=temperature,
        entropy="entropy" in want,
        sum_p_squared="sum_p_squared" in want,
        candidates=inputs.columns.get(CANDIDATES),
        kept=inputs.list_of_tokens(KEPT) if KEPT in inputs.lists else None,
        top_k=top_k[0] if top_k else 0,
        rest="rest_logprobs" in want,
    )
    return Output(**fields)


def _read_values(network: TokenModel, inputs: TokenBatch, hidden: Tensor) -> Output:
    head = network.head
    if head.weight.shape[0] != 1:
        raise EngineError(f"{type(network).__name__} has no value head, but values were asked for")
    values = nn.functional.linear(hidden, head.weight, head.bias)
    values = at_least_float32(values.squeeze(1))
    token_at, hidden_at = predicted_positions(inputs.response_mask)
    return Output(
        values=spread(values[hidden_at], token_at, inputs.tokens),
        bootstrap=values[bootstrap_positions(inputs.attention_mask)],
    )


def vocabulary_of(model: nn.Module) -> int | None:
    """The number of tokens that have an embedding; None where a model does not tell."""
    host = getattr(model, "decoder", model)
    if not isinstance(host, PreTrainedModel):
        return None
    return getattr(host.get_input_embeddings(), "num_embeddings", None)


def check_tokens(tokens: Tensor, vocabulary: int | None) -> None:
    """Make sure that every token has an embedding.

    Args:
        tokens: int64 of any shape.
        vocabulary: as `vocabulary_of` says.

    Raises:
        DataError: one has none: the tokenizer is that of another model.
    """
    if vocabulary is None or not tokens.numel() or int(tokens.max()) < vocabulary:
        return
    raise DataError(
        f"token id {int(tokens.max())} has no embedding: the model has {vocabulary}, ids 0 to "
        f"{vocabulary - 1}. Its tokenizer, or an added token, belongs to another model"
    )


def unpadded(tokens: Tensor) -> TokenBatch:
    """Rows of tokens [B, T] without padding, as a batch whose every token is trained on."""
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    return TokenBatch(tokens=tokens, attention_mask=everywhere, response_mask=everywhere)


def _last_hidden(decoder: nn.Module, batch: TokenBatch) -> Tensor:
    # Rows are right-padded and attention is causal, so no real token sees padding and no mask has
    # to be built. Positions that start again mark packed rows: transformers keeps them apart, but
    # only when it is given no mask. Some models take no positions: without any they count alike.
    if family_of(decoder) is not None:
        from oxrl.models.vision_network import read_with_images  # models of text do without

        return read_with_images(decoder, batch, use_cache=False).last_hidden_state
    positions: dict[str, Tensor] = {}
    if batch.position_ids is not None:
        positions["position_ids"] = batch.position_ids
    output = decoder(input_ids=batch.tokens, attention_mask=None, use_cache=False, **positions)
    return output.last_hidden_state


def token_model(model: nn.Module) -> TokenModel:
    """`model` itself if it is a TokenModel, else the wrapper around a Hugging Face causal LM.

    Raises:
        EngineError: the module is neither.
    """
    if isinstance(model, PreTrainedModel):
        return CausalNetwork(model)
    if hasattr(model, "backbone") and hasattr(model, "head"):
        return cast(TokenModel, model)
    raise EngineError(
        f"{type(model).__name__} is neither a Hugging Face causal language model nor a module with "
        "`backbone(batch)` and `head` (oxrl.models.network.TokenModel)"
    )
