"""Tiny random models of every family that reads images, written to folders as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from oxrl.modelfiles.builtin import SPECIAL_TOKENS, byte_tokenizer
from support.figures import SEED

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "idefics3", "gemma3", "llava")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": True,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.08,
}
HALF = [0.5, 0.5, 0.5]


def _qwen(family: str, tokens: dict[str, int], heads: int) -> tuple[Any, Any]:
    third = family == "qwen3_vl"
    patch = 8
    sections = [2, 3, 3] if heads == 4 else [4, 6, 6]
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": sections}
    rope |= {"mrope_interleaved": True} if third else {}
    text = {**_text(heads), "rope_parameters": rope}
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.08,
    }
    if third:
        tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    else:
        tower |= {"fullatt_block_indexes": [1], "window_size": 4 * patch}
    ids = {
        "vision_start_token_id": tokens["<|vision_start|>"],
        "vision_end_token_id": tokens["<|vision_end|>"],
        "image_token_id": tokens["<|image_pad|>"],
        "video_token_id": tokens["<|video_pad|>"],
    }
    made = transformers.Qwen3VLConfig if third else transformers.Qwen2_5_VLConfig
    text["vocab_size"] = tokens["size"]
    config = made(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)
    processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 256, "longest_edge": 4096},
        image_mean=HALF,
        image_std=HALF,
    )
    return config, processor


def _text(heads: int) -> dict[str, Any]:
    return TEXT | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": TEXT["hidden_size"] // heads,
    }


def _others(family: str, tokens: dict[str, int], heads: int) -> tuple[Any, Any]:
    text = {**_text(heads), "vocab_size": tokens["size"]}
    if family in ("idefics3", "smolvlm"):
        small = family == "smolvlm"
        made: Any = transformers.SmolVLMConfig if small else transformers.Idefics3Config
        config: Any = made(
            text_config={"model_type": "llama", **text},
            vision_config=TOWER,
            image_token_id=tokens["<image>"],
            scale_factor=2,
            pad_token_id=0,
            tie_word_embeddings=True,
        )
        size = {"longest_edge": 64}  # cut into tiles of 32
        cut: Any = (
            transformers.SmolVLMImageProcessorPil
            if small
            else transformers.Idefics3ImageProcessorPil
        )
        return config, cut(do_image_splitting=True, size=size, max_image_size={"longest_edge": 32})
    if family == "gemma3":
        config = transformers.Gemma3Config(
            text_config={**text, "sliding_window": 512},
            vision_config={**TOWER, "vision_use_head": False},
            mm_tokens_per_image=4,
            boi_token_index=tokens["<boi>"],
            eoi_token_index=tokens["<eoi>"],
            image_token_index=tokens["<image_soft_token>"],
        )
        size = {"height": 32, "width": 32}
        return config, transformers.Gemma3ImageProcessorPil(
            size=size, image_mean=HALF, image_std=HALF
        )
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **text},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **TOWER},
        image_token_index=tokens["<image>"],
        image_seq_length=16,
        tie_word_embeddings=True,
    )
    return config, transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )


SPECIAL = {
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "qwen3_vl": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>")
    + tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    "gemma3": ("<boi>", "<eoi>", "<image_soft_token>"),
    "llava": ("<image>",),
}
SPECIAL["smolvlm"] = SPECIAL["idefics3"]
SHOWN = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "gemma3": "<boi>",
    "llava": "<image>",
}


def write_family(family: str, folder: Path, heads: int = 4) -> Path:
    """A random model, its tokenizer and its image processor in `folder`.

    vLLM on CPU takes heads of 32 and more: two of them.
    """
    special = (*SPECIAL_TOKENS, *SPECIAL[family])
    tokenizer = byte_tokenizer(special)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", SHOWN[family])
    tokens = {name: place for place, name in enumerate(special)} | {"size": len(tokenizer)}
    make = _qwen if family.startswith("qwen") else _others
    config, processor = make(family, tokens, heads)
    torch.manual_seed(SEED)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    if family == "gemma3":  # zero otherwise, and then the tower gets no gradient
        torch.nn.init.normal_(
            model.model.multi_modal_projector.mm_input_projection_weight, std=0.08
        )
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_image(path: Path, width: int, height: int, seed: int) -> str:
    """Noise, so that no two images are alike; returns the file's name."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(values.numpy()).save(path)
    return path.name
