"""Sizes of a model read from its files without torch: parameter count, context, cache per token."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oxrl.config.schema import Config
from oxrl.models.builtin import BUILTIN_DIMS, is_builtin

# Published models whose files `plan` need not see, in the order of QWEN25_KEYS; context 32768.
QWEN25 = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
QWEN25_KEYS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size "
    "tie_word_embeddings"
).split()


@dataclass(frozen=True)
class ModelDims:
    """A decoder-only transformer. `parameters` counts tied embeddings once."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    head_dim: int
    context: int | None


def model_dims(name: str) -> ModelDims | None:
    """Sizes of a folder, a built-in or a well-known published model; None when they cannot be known
    offline.
    """
    if is_builtin(name):
        return _from_config(
            {**BUILTIN_DIMS.get(name, {}), "model_type": "qwen3", "tie_word_embeddings": True}, None
        )
    published = QWEN25.get(name.removeprefix("Qwen/Qwen2.5-").removesuffix("-Instruct"))
    if published is not None and name.startswith("Qwen/"):
        values = dict(zip(QWEN25_KEYS, published, strict=True))
        return _from_config(
            {**values, "model_type": "qwen2", "max_position_embeddings": 32768}, None
        )
    try:
        values = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _from_config(values, stored_parameters(Path(name))) if isinstance(values, dict) else None


def _from_config(values: Mapping[str, Any], stored: int | None) -> ModelDims | None:
    """Read a Hugging Face text config; the count is exact for Llama, Mistral, Qwen2 and Qwen3."""
    values = {**values, **(values.get("text_config") or {})}
    try:
        hidden, layers, vocab = (
            values["hidden_size"],
            values["num_hidden_layers"],
            values["vocab_size"],
        )
        heads, inner = values["num_attention_heads"], values["intermediate_size"]
    except KeyError:
        return None
    kv_heads, head_dim = (
        values.get("num_key_value_heads") or heads,
        values.get("head_dim") or hidden // heads,
    )
    family = values.get("model_type", "")
    if stored is None and family not in ("llama", "mistral", "qwen2", "qwen3"):
        return None
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    if family == "qwen2" or values.get("attention_bias"):
        attention += (heads + 2 * kv_heads) * head_dim
    if family == "qwen3":
        attention += 2 * head_dim
    embeddings = vocab * hidden * (1 if values.get("tie_word_embeddings", False) else 2)
    parameters = (
        stored or layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden + embeddings
    )
    return ModelDims(
        parameters, layers, hidden, inner, kv_heads, head_dim, values.get("max_position_embeddings")
    )


def stored_parameters(folder: Path) -> int | None:
    """Parameters in the folder's model*.safetensors, from their headers; None when there are
    none.
    """
    total = 0
    for file in folder.glob("model*.safetensors"):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            # A header beyond 100 MB is refused by the format; a truncated file must not make us
            # read gigabytes.
            try:
                header = json.loads(stream.read(min(size, 100_000_000)))
            except ValueError:
                return None
        total += sum(
            math.prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__"
        )
    return total or None


def context_length(cfg: Config) -> int | None:
    """Longest row in tokens: `model.max_length`, else the model's own, else None."""
    dims = model_dims(cfg.model.name)
    return cfg.model.max_length or (dims.context if dims is not None else None)
