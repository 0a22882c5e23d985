"""GGUF files of a small model, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}<e>{% endfor %}"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
}


def letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


LETTERS = letters()


def spelled(text: str) -> str:
    return "".join(LETTERS[byte] for byte in text.encode())


def vocabulary() -> tuple[list[str], list[str]]:
    """Three control tokens, every byte, and merges that a wrong cut of the text would use."""
    pairs = [
        "  ",
        "\n\n",
        " 1",
        "12",
        "123",
        " 12",
        "th",
        "the",
        " t",
        " th",
        " the",
        "1a",
        "00",
        "2.",
        " \n",
    ]
    merges: list[str] = []
    tokens = ["<s>", "<e>", "<t>", *LETTERS]
    for pair in pairs:
        left, right = spelled(pair[:-1]), spelled(pair[-1])
        assert left in tokens
        merges.append(f"{left} {right}")
        tokens.append(left + right)
    return tokens, merges


TOKENS, MERGES = vocabulary()


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection as llama.cpp keeps them: pairs to rotate side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, rest = base.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[base]}.{kind}"


def small(
    config_class: type[PreTrainedConfig], *, tied: bool, seed: int, **sizes: int
) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = SMALL | sizes
    config = config_class(vocab_size=len(TOKENS), tie_word_embeddings=tied, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():  # norms other than one, biases other than zero
        torch.nn.init.normal_(weight, std=0.2)
    return model


def llama(*, tied: bool = True, seed: int = 0) -> PreTrainedModel:
    return small(LlamaConfig, tied=tied, seed=seed)


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    rule: str | None = "smollm",
    blocks: str | None = None,
    drop: str = "",
    extra: dict[str, np.ndarray] | None = None,
    **fields: Any,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(str(path), model.config.model_type)
    writer.add_name("small")
    writer.add_license("apache-2.0")
    writer.add_context_length(SMALL["max_position_embeddings"])
    writer.add_embedding_length(SMALL["hidden_size"])
    writer.add_block_count(SMALL["num_hidden_layers"])
    writer.add_feed_forward_length(SMALL["intermediate_size"])
    writer.add_head_count(SMALL["num_attention_heads"])
    writer.add_head_count_kv(SMALL["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(model.config.head_dim)
    writer.add_key_length(model.config.head_dim)
    writer.add_value_length(model.config.head_dim)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, value in fields.items():
        getattr(writer, name)(*value if isinstance(value, tuple) else (value,))
    for name, weight in model.state_dict().items():
        array = weight.numpy().astype(np.float32)
        short = gguf_name(name)
        if short == drop or (name == "lm_head.weight" and model.config.tie_word_embeddings):
            continue
        for kind, heads in (("attn_q", 4), ("attn_k", 2)):
            if f"{kind}.weight" in short and model.config.model_type == "llama":
                array = permuted(array, heads)
        if blocks is not None and array.ndim == 2:
            kind = gguf.GGMLQuantizationType[blocks]
            writer.add_tensor(short, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(short, array)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
