"""Tiny checkpoints with random weights of the architectures that transformers builds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, PreTrainedModel

# Ids of the built-in tokenizer.
IDS = {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 259}
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Of the families that mix kinds of layers, one layer of each kind.
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# A window shorter than the rows of the tests.
WINDOW = {"sliding_window": 8}
BOTH = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA_WINDOW = {**BOTH, "query_pre_attn_scalar": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "llama": {},
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma2": GEMMA_WINDOW,
    "gemma3_text": GEMMA_WINDOW,
    "gemma3": GEMMA_WINDOW,
    "phi": {"num_key_value_heads": 4},
    "phi3": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {},
    "olmo2": {},
    "olmo3": BOTH,
    "smollm3": {},
    "cohere2": BOTH,
    "glm4": {},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "ernie4_5": {},
    "starcoder2": {},
    "stablelm": {},
    "hunyuan_v1_dense": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 16},
}
# Carry something over from one packed example to the next.
UNPACKABLE = (
    "qwen3_next",
    "qwen3_5_text",
    "gpt_oss",
    "lfm2",
    "opt",
    "bloom",
    "falcon",
    "mamba",
    "mamba2",
)
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def tiny(family: str) -> PreTrainedModel:
    """A random model of a family, neither uniform nor certain about a token."""
    sizes = {**SIZES, **FAMILIES[family]}
    if family == "falcon":
        del sizes["head_dim"]  # a property there
    torch.manual_seed(0)
    if family == "gemma3":
        images = {"image_token_index": 255, "boi_token_index": 254, "eoi_token_index": 253}
        config = Gemma3Config(
            text_config={**sizes, **IDS}, vision_config=VISION, mm_tokens_per_image=4, **images
        )
    else:
        config = AutoConfig.for_model(family, **sizes, **IDS)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model.eval()
