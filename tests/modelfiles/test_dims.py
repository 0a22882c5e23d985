"""Sizes read from a model's configuration are those of the model that it describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oxrl.modelfiles.dims import model_dims, why_unsupported
from oxrl.models.load import load_policy

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 77,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, wide heads": {"model_type": "llama", "head_dim": 10},
    "llama with biases": {"model_type": "llama", "attention_bias": True},
    "mistral, tied": {"model_type": "mistral", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "qwen3, tied, with biases": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}


def model_of(folder: Path) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))


def numbers(model: torch.nn.Module, *ends: str) -> int:
    return sum(
        weight.numel() for name, weight in model.named_parameters() if name.endswith(ends or "")
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_of_a_configuration_are_those_of_its_model(name: str, tmp_path: Path) -> None:
    config = {**SIZES, **CONFIGS[name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dims = model_dims(str(tmp_path))
    assert dims is not None
    model = model_of(tmp_path)
    assert (dims.layers, dims.context, dims.vocabulary) == (3, 77, 50)
    queries, keys, output = "q_proj.weight", "k_proj.weight", "o_proj.weight"
    assert dims.queries * 24 * 3 == numbers(model, queries)
    assert dims.keys * 24 * 3 == numbers(model, keys)
    matrices = numbers(model, queries, keys, "v_proj.weight", output)
    assert dims.attention * 3 == matrices
    of_layers = matrices + numbers(model, "gate_proj.weight", "up_proj.weight", "down_proj.weight")
    assert dims.layer * 3 == of_layers
    assert dims.ends == numbers(model, "embed_tokens.weight", "lm_head.weight")
    assert dims.parameters == numbers(model)


def test_parameters_of_what_is_built_in_are_counted() -> None:
    dims = model_dims("builtin:tiny")
    assert dims is not None and dims.tied
    assert dims.parameters == sum(
        weight.numel() for weight in load_policy("builtin:tiny").parameters()
    )


def test_parameters_of_a_family_that_is_not_known_are_not_guessed(tmp_path: Path) -> None:
    config = {"model_type": "of tomorrow", **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_dims(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bert"}, "is a bidirectional encoder (bert)"),
        ({"model_type": "bert", "is_decoder": True}, None),
        ({"model_type": "llama"}, None),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder (t5)"),
        ({"model_type": "llama4"}, "is of the family llama4"),
        ({"model_type": "odd", "audio_config": {}}, "has a audio encoder"),
    ],
)
def test_what_cannot_be_trained_is_told(
    config: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = why_unsupported(str(tmp_path))
    assert told is None if words is None else told is not None and told.startswith(words)
