"""The choice of a sampler of this process for a model: the fast one where it is right for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import ModuleSampler
from oxrl.modelfiles.folder import family_of

if TYPE_CHECKING:
    from oxrl.data.image_store import ImageStore

# Families that LocalSampler was compared with (tests/recipes/test_architectures.py): they take
# position ids and a mask, and their keys and values have one shape in all layers. Every other model
# is sampled from over its own cache.
FAST = frozenset(
    {
        "ernie4_5",
        "falcon",
        "gemma",
        "glm4",
        "gpt2",
        "gpt_neox",
        "granite",
        "hunyuan_v1_dense",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)


def module_sampler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_rows: int,
    longest: int | None = None,
    images: ImageStore | None = None,
) -> ModuleSampler:
    """Build the sampler for a model that lies in this process.

    Args:
        model: a Hugging Face causal LM.
        max_rows: rows decoded at the same time.
        longest: most tokens of a prompt and its response that will be asked for; None: not known.
        images: of the prompts; None: there are none.

    Raises:
        EngineError: the model has no separate output head, or keeps no cache.
    """
    reads_images = family_of(model) is not None
    # The fast one decodes with attention of its own, which stands in for sdpa alone.
    fast = getattr(model.config, "_attn_implementation", None) == "sdpa" and not reads_images
    if fast and attends_to_everything(model.config, longest):
        return LocalSampler(model, tokenizer, max_rows=max_rows)
    from oxrl.engines.sample.cached import (  # models that the fast one is wrong for
        CachedSampler,
        VisionSampler,
    )

    if reads_images:
        return VisionSampler(model, tokenizer, max_rows=max_rows, images=images)
    return CachedSampler(model, tokenizer, max_rows=max_rows)


def attends_to_everything(config: PreTrainedConfig, longest: int | None) -> bool:
    """True if every layer of a known family attends to everything before a token.

    A Mistral's window is no window for rows that fit into it.
    """
    text = config.get_text_config()
    if text.model_type not in FAST:
        return False
    layers = getattr(text, "layer_types", None)
    if layers:
        return set(layers) == {"full_attention"}
    window = getattr(text, "sliding_window", None)
    if not window:
        return True
    reach = longest or text.max_position_embeddings
    return reach <= window
