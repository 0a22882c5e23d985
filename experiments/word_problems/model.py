"""A small model that reads words: a vocabulary of the problems' own, and the signs of formulas."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from problems import MOST_NUMBERS
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from oxrl.modelfiles.builtin import CHAT_TEMPLATE, SPECIAL_TOKENS

UNKNOWN = "<|unknown|>"
MARKS = (*(f"n{place}" for place in range(1, MOST_NUMBERS + 1)), "m1", *"+-*/")
# A word that one problem has alone is unknown: so are most new ones of problems that come later.
LEAST = 2


def word_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A token per word and sign.

    Args:
        texts: one of each problem.
    """
    cut = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Punctuation(),
        ]
    )
    counts: Counter[str] = Counter()
    for text in texts:
        words = [word for word, _ in cut.pre_tokenize_str(text.lower())]
        counts.update({*words})
    known = sorted(word for word, count in counts.items() if count >= LEAST)
    names = dict.fromkeys((*SPECIAL_TOKENS, UNKNOWN, *MARKS, *known))
    vocabulary = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.Fuse()
    special = [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special)
    pad, end, *others = SPECIAL_TOKENS
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        unk_token=UNKNOWN,
        extra_special_tokens=others,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def write_model(folder: Path, texts: Iterable[str], seed: int) -> int:
    """Random weights and a tokenizer as transformers keeps them; how many parameters."""
    tokenizer = word_tokenizer(texts)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def known_share(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> float:
    """Share of the words of texts that the tokenizer knows."""
    words = [word for text in texts for word in re.findall(r"[a-z']+", text.lower())]
    vocabulary = tokenizer.get_vocab()
    return sum(word in vocabulary for word in words) / len(words)
