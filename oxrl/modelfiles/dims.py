"""Sizes of a model read from its files without torch: parameter count, context, cache per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from safetensors import SafetensorError

from oxrl.modelfiles.builtin import BUILTIN_DIMS, BUILTIN_VISION, is_builtin
from oxrl.modelfiles.folder import (
    TensorKind,
    config_file,
    has_own_head,
    model_config,
    stored_kinds,
)
from oxrl.tables.vision import VISION_FAMILIES

# Families whose parameters can be counted from their sizes alone.
COUNTED = ("llama", "mistral", "qwen2", "qwen3")

# How the names of families begin whose queries and keys go through a norm of their own.
NORMED_HEADS = ("qwen3", "gemma3", "olmo2", "olmo3")


# How configurations call the number of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

# Bidirectional encoders define no next-token probability.
ENCODERS = frozenset(
    {
        "albert",
        "bert",
        "camembert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "longformer",
        "mobilebert",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "roformer",
        "squeezebert",
        "xlm-roberta",
    }
)


@dataclass(frozen=True)
class ModelDims:
    """A decoder-only transformer. `parameters` counts tied embeddings once.

    vocabulary: tokens that it can tell apart. heads: of queries, per layer. tied: the output head
    is the embeddings. routed: a token is read by some of the parameters only (experts).
    normed_heads: queries and keys go through a norm of their own.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    head_dim: int
    context: int | None
    vocabulary: int
    heads: int
    tied: bool
    routed: bool
    normed_heads: bool

    @property
    def queries(self) -> int:
        """Numbers of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def attention(self) -> int:
        """Weights of the matrices of a layer's attention."""
        return 2 * self.hidden * (self.queries + self.keys)

    @property
    def layer(self) -> int:
        """Weights of the matrices of a layer."""
        return self.attention + 3 * self.hidden * self.intermediate

    @property
    def ends(self) -> int:
        """Weights of embeddings and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)


# Families without an implementation, as transformers' classes say; a test compares.
WITHOUT = {
    "sdpa": ("bloom", "gpt_oss", "mamba", "mamba2"),
    "flash_attention_2": ("bloom", "llama4_text", "mamba", "mamba2"),
}


def model_dims(name: str) -> ModelDims | None:
    """Sizes of a model, None when its files are not on this machine or do not tell them.

    Args:
        name: a folder, a built-in model, or a hub name, of which the local cache is read.
    """
    if is_builtin(name):
        family = {"model_type": "qwen3", "tie_word_embeddings": True}
        return _from_config({**BUILTIN_DIMS.get(name, {}), **family}, BUILTIN_VISION.get(name))
    values = model_config(name)
    if values is None:
        return None
    try:
        kinds = stored_kinds(config_file(name).parent)
    except SafetensorError:
        kinds = []  # whoever reads the model says so
    return _from_config(values, sum(prod(kind.shape) for kind in kinds) or None, kinds)


def why_unsupported(name: str) -> str | None:
    """Find out why oxRL cannot train or sample from a model.

    Args:
        name: as of `model_dims`.

    Returns:
        The reason; None where there is none that the model's files tell.
    """
    values = None if is_builtin(name) else model_config(name)
    if values is None:
        return None
    family = str(values.get("model_type"))
    if values.get("is_encoder_decoder"):
        return f"is an encoder-decoder ({family}); oxRL trains decoder-only language models"
    if family in ENCODERS and not values.get("is_decoder"):
        return (
            f"is a bidirectional encoder ({family}), which defines no next-token probability; oxRL "
            "trains causal language models"
        )
    if family in ("llama4", "llama4_text"):
        return (
            f"is of the family {family}, of which transformers keeps no backbone apart from the "
            "output head; oxRL needs the two apart"
        )
    reads = [part for part in ("vision", "audio") if f"{part}_config" in values]
    if reads and family not in VISION_FAMILIES:
        known = ", ".join(VISION_FAMILIES)
        return f"has a {reads[0]} encoder, and {family} is none of the families known here: {known}"
    return None


def without_attention(name: str, wanted: str) -> str | None:
    """Find out why a model cannot compute attention as wanted.

    Args:
        name: as of `model_dims`.
        wanted: as `model.attention`.

    Returns:
        The reason; None where there is none that the model's files tell.
    """
    values = None if is_builtin(name) else model_config(name)
    family = str((values or {}).get("model_type"))
    if family not in WITHOUT.get(wanted, ()):
        return None
    return f"is what transformers' {family} cannot do"


def vocabulary_of(name: str) -> int:
    """Tokens of a model, 0 where its files are not on this machine or do not tell."""
    dims = model_dims(name)
    return 0 if dims is None else dims.vocabulary


def _from_config(
    values: Mapping[str, Any], stored: int | None, kinds: Sequence[TensorKind] = ()
) -> ModelDims | None:
    """Read a Hugging Face text config.

    Args:
        stored: the number of stored parameters, where it is known.
        kinds: of stored tensors.
    """
    values = {**values, **(values.get("text_config") or {})}
    family = str(values.get("model_type"))
    # Transformers ties no model whose files say otherwise, and none of these that say nothing.
    tied = bool(values.get("tie_word_embeddings", family not in COUNTED))
    own_head = has_own_head(kinds) if tied else None
    try:
        hidden = values["hidden_size"]
        heads = values["num_attention_heads"]
        dims = ModelDims(
            parameters=stored or 0,
            layers=values["num_hidden_layers"],
            hidden=hidden,
            intermediate=values["intermediate_size"],
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or hidden // heads,
            context=values.get("max_position_embeddings"),
            vocabulary=values["vocab_size"],
            heads=heads,
            tied=tied and not own_head,
            routed=any(values.get(name) for name in EXPERTS),
            normed_heads=family.startswith(NORMED_HEADS),
        )
    except KeyError:
        return None
    if stored is not None:
        # A copy of the embeddings is one weight with them in memory.
        copied = dims.tied and own_head is not None
        return replace(dims, parameters=stored - hidden * dims.vocabulary) if copied else dims
    if family not in COUNTED:
        return None
    layer = dims.layer + 2 * hidden  # norms
    biased = family in ("llama", "qwen3") and values.get("attention_bias")
    if family == "qwen2" or biased:
        layer += dims.queries + 2 * dims.keys
    if biased:
        layer += hidden
    if family == "qwen3":
        layer += 2 * dims.head_dim
    return replace(dims, parameters=int(dims.layers * layer + hidden + dims.ends))


def model_context(name: str) -> int | None:
    """Longest row, in tokens, that a model was made for; None where that is not known."""
    dims = model_dims(name)
    return None if dims is None else dims.context
