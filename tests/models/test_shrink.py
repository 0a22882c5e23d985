"""A dry run trains the architecture that the real run will, at sizes that cost a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from oxrl.commands.dry_run import dry_run
from oxrl.config import Config
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.models.self_checks import shrink
from support.architectures import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")
# Its defaults name no size of a head, without which it cannot be built at any size.
EXTRA: dict[str, dict[str, Any]] = {"hunyuan_v1_dense": {"head_dim": 128}}


def published(family: str) -> PreTrainedConfig:
    """A configuration at the sizes that transformers has as the family's own, few words apart."""
    config = AutoConfig.for_model(family, **EXTRA.get(family, {}))
    config.get_text_config().vocab_size = 300
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_small_once_shrunk_and_still_itself(family: str) -> None:
    config = published(family)
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or [])
    shrink(config)
    text = config.get_text_config()
    assert set(getattr(text, "layer_types", None) or []) == kinds
    config.get_text_config().pad_token_id = None
    model = AutoModelForCausalLM.from_config(config).eval()
    assert text.num_hidden_layers <= 6
    language = [size.numel() for name, size in model.named_parameters() if "vision" not in name]
    assert sum(language) < 1_000_000
    with torch.no_grad():
        assert model(torch.arange(12)[None]).logits.isfinite().all()


def test_what_heads_are_to_each_other_stays() -> None:
    config = LlamaConfig(num_attention_heads=32, num_key_value_heads=8)
    shrink(config)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 1)


def test_a_small_model_is_left_as_it_is() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    before = config.to_dict()
    shrink(config)
    assert config.to_dict() == before


TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}[assistant]"


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the sizes and the tokenizer of a model far too large for a test, no weights."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "large"
    config = LlamaConfig(
        vocab_size=261, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8
    )
    config.save_pretrained(folder)
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 8)
    return folder


@pytest.mark.parametrize("algorithm", ["sgrpo", "dapo", "grpo"])
def test_a_dry_run_trains_the_architecture_of_the_run(llama: Path, algorithm: str) -> None:
    values = {
        "run": {"name": "dry", "steps": 8, "threads": 1},
        "model": {"name": str(llama)},
        "data": {"train": "train.jsonl", "prompts_per_step": 4},
        "reward": {"name": "exact"},
        "rollout": {"max_tokens": 4000},
        "train": {"alg_name": algorithm},
    }
    described = dry_run(Config.model_validate(values))
    assert f"LlamaForCausalLM made small after {llama}" in described
    assert not (llama.parent / "runs").exists()
    assert json.loads((llama / "config.json").read_text())["hidden_size"] == 8192


def test_a_dry_run_of_rows_whose_evaluations_answer_nothing_sets_nothing_of_rollouts(
    llama: Path,
) -> None:
    row = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
    (llama.parent / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    values = {
        "run": {"name": "dry", "steps": 8, "threads": 1},
        "model": {"name": "builtin:tiny"},
        "data": {"train": "train.jsonl", "rows_per_step": 4},
        "train": {"alg_name": "sft"},
    }
    assert dry_run(Config.model_validate(values)) == "builtin:tiny"
