"""Small models that need no file and no network: Qwen3 architecture, seeded random weights.

Their tokenizer has one token per byte. The one that reads images is in `builtin_vision.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = len(SPECIAL_TOKENS) + 256

# The text part of both models that read images.
TINY_VISION = {
    "vocab_size": VOCABULARY + 4,
    "max_position_embeddings": 2048,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Keyword arguments of Qwen3Config, so that memory can be estimated without importing torch.
BUILTIN_DIMS: Mapping[str, Mapping[str, Any]] = {
    # 0.15M parameters: what the quickstart trains in minutes on two CPU cores.
    "builtin:tiny": {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
    # 3.3M parameters: the shape of the speed benchmarks.
    "builtin:small": {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "hidden_size": 256,
        "intermediate_size": 800,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    # 0.40M parameters with its vision tower: reads images (`builtin_vision.py`).
    "builtin:tiny-vl": TINY_VISION,
    # 0.21M: every square of 8 pixels is a token, for worlds of small tiles.
    "builtin:tiny-vla": TINY_VISION,
}
# Built-in models that read images -> their parameters, which sizes of the text part do not tell.
BUILTIN_VISION: Mapping[str, int] = {"builtin:tiny-vl": 397_952, "builtin:tiny-vla": 208_384}


def is_builtin(name: str) -> bool:
    """True for names of this module, known or not: `builtin:` is never a path or a hub name."""
    return name.startswith("builtin:")


def builtin_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, five special tokens, and a chat template `<|role|>content<|end|>`."""
    tokenizer = byte_tokenizer(SPECIAL_TOKENS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byte_tokenizer(special: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per byte, behind special tokens of which the first two are pad and end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*special, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    pad, end, *others = special
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        extra_special_tokens=others,
        clean_up_tokenization_spaces=False,
    )


def builtin_policy(name: str, *, seed: int) -> Qwen3ForCausalLM:
    """Float32 model with random weights that depend on `seed` only.

    Raises:
        KeyError: `name` is not in BUILTIN_DIMS.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **BUILTIN_DIMS[name],
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
