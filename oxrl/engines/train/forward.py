"""A model's forward pass over one micro-batch: from tokens to the fields of `Output`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig

from oxrl.engines.train.base import Want
from oxrl.errors import EngineError
from oxrl.functional.logprobs import bootstrap_positions, chunked_head, predicted_positions, spread
from oxrl.functional.masks import at_least_float32
from oxrl.models.network import TokenModel, attention_by
from oxrl.types import Output, TokenBatch

TOP_K = "top_k="
# Runs a model and raises where something is wrong with it.
Check = Callable[[], None]


class Reader(nn.Module):
    """The whole forward pass as one module: what sharding libraries hook to gather weights."""

    def __init__(self, model: nn.Module, network: TokenModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        # In a tuple, so that nothing of it is registered here a second time.
        self._network = (network,)
        self._temperature = temperature

    def forward(self, inputs: TokenBatch | Check, want: Want) -> dict[str, Tensor]:
        """The fields of Output that were asked for, in a dict: hooks look into plain containers.

        A check is called instead, where the weights that it reads are gathered.
        """
        [network] = self._network
        if not isinstance(inputs, TokenBatch):
            inputs()
            return {}
        output = read_tokens(network, inputs, want, temperature=self._temperature)
        # Cloned, because hooks that gather weights for backward do not survive on views.
        return {name: value.clone() for name, value in vars(output).items() if value is not None}


def read_tokens(
    network: TokenModel, inputs: TokenBatch, want: Want, *, temperature: float
) -> Output:
    """What a network says of one micro-batch; differentiable.

    Args:
        network: the model.
        inputs: [B, T] tokens, right-padded.
        want: which fields of `Output` to compute.
        temperature: logits are divided by it.

    Returns:
        Token-aligned fields, 0.0 wherever `response_mask` is False: the head runs nowhere else.

    Raises:
        EngineError: values were asked of a network without a value head.
    """
    hidden = network.backbone(inputs).flatten(0, 1)
    if "values" in want:
        return _read_values(network, inputs, hidden)
    token_at, hidden_at = predicted_positions(inputs.response_mask)
    candidates = inputs.candidates
    if candidates is not None:
        candidates = candidates.flatten(0, 1)[token_at]
    top_k = [int(field.removeprefix(TOP_K)) for field in want if field.startswith(TOP_K)]
    said = chunked_head(
        hidden[hidden_at],
        network.head,
        inputs.tokens.flatten()[token_at],
        temperature=temperature,
        entropy="entropy" in want,
        sum_p_squared="sum_p_squared" in want,
        candidates=candidates,
        top_k=top_k[0] if top_k else 0,
    )
    fields = {
        name: spread(value, token_at, inputs.tokens)
        for name, value in said._asdict().items()
        if value is not None
    }
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


def checkpoint_activations(model: nn.Module) -> None:
    """Let each layer of `model` be computed again in backward, instead of storing what it computed.

    Raises:
        EngineError: the model does not know how.
    """
    host: Any = getattr(model, "decoder", model)
    enable = getattr(host, "gradient_checkpointing_enable", None)
    if enable is None:
        raise EngineError(
            f"{type(model).__name__} does not support gradient checkpointing; set it to false"
        )
    given = {"use_reentrant": False, "context_fn": partial(_attention_kept, host.config)}
    cast(Callable[..., Any], enable)(gradient_checkpointing_kwargs=given)
    # Checkpointed layers recompute only in train mode, which must not switch dropout on, whatever a
    # model calls it.
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)


def _attention_kept(
    config: PreTrainedConfig,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a layer that is computed now, and of the same layer computed again: the second
    has what computes attention now, which the end of a forward pass may have changed.
    """
    return nullcontext(), attention_by(config, config._attn_implementation)  # pyright: ignore[reportPrivateUsage]
