"""`builtin:tiny-vl` and `builtin:tiny-vla`: small Qwen3-VLs without files that can learn.

At the usual initialisation a model of this width learns next to nothing: attention starts flat, and
where a patch lies drowns in what it shows. So weights are drawn with a standard deviation of 0.08,
the positions of patches with 1, and rotary angles turn a hundred times faster than in large models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oxrl.modelfiles.builtin import BUILTIN_DIMS, SPECIAL_TOKENS, byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

TINY_VL = "builtin:tiny-vl"
TINY_VLA = "builtin:tiny-vla"
SPREAD = 0.08
# Of the rotary angles.
BASE = 100.0
PATCH = 8
# Patches whose square is one token; a tile of a small world is one patch.
MERGE = {TINY_VL: 2, TINY_VLA: 1}
# Places of patches that the tower tells apart.
PLACES = {TINY_VL: 16, TINY_VLA: 25}
DEPTH = {TINY_VL: 2, TINY_VLA: 1}
# Pixels of the smallest and the largest image as the model sees it.
FEWEST_PIXELS = 256
MOST_PIXELS = 4096

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FIELDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
IMAGE_IDS: Mapping[str, Any] = {
    name: len(SPECIAL_TOKENS) + place for place, name in enumerate(FIELDS)
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, as of the other built-in models, and four around images."""
    tokenizer = byte_tokenizer((*SPECIAL_TOKENS, *IMAGE_TOKENS))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def vision_config(name: str) -> Qwen3VLConfig:
    """The architecture of a built-in model that reads images."""
    from transformers import Qwen3VLConfig

    rotations = {
        "rope_type": "default",
        "rope_theta": BASE,
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
    }
    text = {
        **BUILTIN_DIMS[name],
        "rope_parameters": rotations,
        "initializer_range": SPREAD,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    tower = {
        "depth": DEPTH[name],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": text["hidden_size"],
        "patch_size": PATCH,
        "spatial_merge_size": MERGE[name],
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [0] if name == TINY_VL else [],
        "num_position_embeddings": PLACES[name],
        "initializer_range": SPREAD,
    }
    return Qwen3VLConfig(
        text_config=text, vision_config=tower, tie_word_embeddings=True, **IMAGE_IDS
    )


def vision_policy(name: str, seed: int) -> Qwen3VLForConditionalGeneration:
    """Float32 model with random weights that depend on `seed` only."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(vision_config(name))
        torch.nn.init.normal_(model.model.visual.pos_embed.weight)
    return model


def vision_processor(name: str) -> Any:
    """The processor that cuts an image into patches for a built-in model that reads images."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE[name],
        temporal_patch_size=2,
        size={"shortest_edge": FEWEST_PIXELS, "longest_edge": MOST_PIXELS},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
