"""Bytes of activations: what a forward pass keeps for the backward pass, and what both need for a
moment.

Read off transformers' decoder layers, tensor by tensor, and compared with the tensors of real runs
by benchmarks/plan_memory.py. Per token of a layer, in numbers (norms compute in float32 and keep
their input so; q and k are widths of all query and key heads, i of the MLP):

    two norms       input, and normalised (for the gradient of its weight); output, for what follows
    heads' norms    of queries and keys, in families that have them: input, and normalised
    attention       rotated q and k, v, output, and a float32 number per head
    MLP             gate, silu(gate), up, product: 4 i
"""

from __future__ import annotations

from typing import NamedTuple

from oxrl.config.schema import Config
from oxrl.modelfiles.dims import ModelDims
from oxrl.tables.numbers import head_chunk

FLOAT32 = 4


class ActivationBytes(NamedTuple):
    """The bytes of one micro-batch's activations.

    on_device: kept for the backward pass, and what that needs for a moment. offloaded: how many of
    those kept wait in CPU memory.
    """

    on_device: int
    offloaded: int


class MicroBatch(NamedTuple):
    """The size of a micro-batch, which the model reads at a time.

    tokens: that it computes. attended: of rows, each with the prompt that it shares with others;
    0: nothing is shared. prompts: of the tokens, those of shared prompts. seen: pairs of tokens of
    which a mask says whether one sees the other.
    """

    tokens: int
    attended: int = 0
    prompts: int = 0
    seen: int = 0


def activation_bytes(cfg: Config, dims: ModelDims, batch: MicroBatch) -> ActivationBytes:
    """Count the activations of one micro-batch at their most, when the backward pass begins.

    Checkpointing keeps the input of each layer, and computes one layer at a time again.

    Args:
        dims: of `cfg.model`.
        batch: as large as they get.
    """
    size = cfg.model.weight_bytes
    layer = layer_bytes(cfg, dims, batch)
    stream = batch.tokens * dims.hidden * size
    last_norm = _norm_bytes(cfg, batch.tokens * dims.hidden) + stream
    head = _head_bytes(cfg, dims, batch.tokens)
    if not cfg.model.gradient_checkpointing:
        most = max(head, _layer_gradients(cfg, dims, batch))
        return ActivationBytes(dims.layers * layer + last_norm + most, 0)
    inputs = dims.layers * stream
    again = layer + _layer_gradients(cfg, dims, batch)
    if cfg.model.offload_activations:
        return ActivationBytes(max(stream + again, last_norm + head), inputs)
    return ActivationBytes(inputs + max(again, last_norm + head), 0)


def layer_bytes(cfg: Config, dims: ModelDims, batch: MicroBatch) -> int:
    """Count the bytes that one layer keeps."""
    size = cfg.model.weight_bytes
    found = 2 * _norm_bytes(cfg, batch.tokens * dims.hidden)
    found += 2 * batch.tokens * dims.hidden * size
    if dims.normed_heads:
        found += _norm_bytes(cfg, batch.tokens * (dims.queries + dims.keys))
    found += _attention_bytes(dims, batch, size)
    found += 4 * batch.tokens * dims.intermediate * size
    if cfg.lora.rank:
        # What A gives, of queries, keys, values, output, gate, up and down.
        found += 7 * batch.tokens * cfg.lora.rank * size
    return found


def _norm_bytes(cfg: Config, numbers: int) -> int:
    """Count a norm's bytes: its input in float32, and normalised where its weight is trained."""
    return numbers * (FLOAT32 if cfg.lora.rank else FLOAT32 + cfg.model.weight_bytes)


def _attention_bytes(dims: ModelDims, batch: MicroBatch, size: int) -> int:
    queries = dims.queries
    sums = FLOAT32 * dims.heads
    if not batch.attended:
        return batch.tokens * ((2 * queries + 2 * dims.keys) * size + sums)
    # Queries and answers of all tokens, and answers once more in the order of the packed row; keys
    # and values, as many as queries, of prompts and of every row with its prompt.
    read = batch.attended + batch.prompts
    own = batch.tokens * (3 * queries * size + sums)
    return own + 2 * read * queries * size + batch.seen * size


def _layer_gradients(cfg: Config, dims: ModelDims, batch: MicroBatch) -> int:
    """Count the bytes that going back through the last layer adds: gradients of the stream, and of
    silu(gate) and up before these are freed; and of tied embeddings, until their own layer has its
    turn.
    """
    numbers = batch.tokens * 2 * (dims.hidden + dims.intermediate)
    if dims.tied and not cfg.lora.rank and cfg.recipe != "reward_model":
        numbers += dims.vocabulary * dims.hidden
    return numbers * cfg.model.weight_bytes


def _head_bytes(cfg: Config, dims: ModelDims, tokens: int) -> int:
    """Count the bytes of the head's backward pass: hidden states that are asked about and their
    gradient, the weight's gradient in float32, and logits of a chunk with their probabilities and
    gradient.
    """
    size = cfg.model.weight_bytes
    chunk = min(tokens, head_chunk(dims.vocabulary)) * dims.vocabulary
    found = 2 * tokens * dims.hidden * size + 3 * chunk * FLOAT32
    if size < FLOAT32:
        found += chunk * size
    if not cfg.lora.rank:
        found += dims.vocabulary * dims.hidden * FLOAT32
    return found
