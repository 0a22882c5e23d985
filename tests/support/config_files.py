"""A working folder with data files, and a writer of YAML that fills in the required sections."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from oxrl.config.checks.algorithm import AT_RATIO_ONE
from oxrl.tables.cells import PROMPTED_SELF, REWARD_PARTS, TEACHER, TEACHER_TOP
from oxrl.tables.policy import ROWS, Row

# Qwen2.5: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied embeddings.
QWEN25 = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "test", "steps": 12},
    "model": {"name": "builtin:tiny"},
    "data": {"train": "data/train.jsonl", "prompts_per_step": 12},
    "reward": {"name": "math"},
    "train": {"alg_name": "sgrpo"},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with config.json of Qwen2.5 models, as `hf download` leaves it."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    commit = "0" * 40
    for size, sizes in QWEN25.items():
        hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = sizes
        values = {
            "model_type": "qwen2",
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32768,
        }
        for name in (f"Qwen2.5-{size}", f"Qwen2.5-{size}-Instruct"):
            model = cache / f"models--Qwen--{name}"
            (model / "snapshots" / commit).mkdir(parents=True)
            (model / "snapshots" / commit / "config.json").write_text(json.dumps(values))
            (model / "refs").mkdir()
            (model / "refs" / "main").write_text(commit)
    return cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("train", "test", "other"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 10)
    return tmp_path


def with_teachers(row: Row, sections: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Sections with what a row that learns from a teacher cannot do without."""
    if not (row.has(TEACHER) or row.has(TEACHER_TOP)):
        return sections
    (folder / "hint.jinja").write_text("Briefly. {{ prompt }}")
    (folder / "data" / "given.jsonl").write_text('{"prompt": "1+1?", "completion": "2"}\n' * 10)
    own: dict[str, Any] = {"own": {"prompt": "hint.jinja"}}
    other: dict[str, Any] = {"big": {"name": "builtin:small"}}
    model = sections["model"] | {"teachers": own if row.has(PROMPTED_SELF) else other}
    found = sections | {"model": model}
    if row.name == "gkd":
        found["data"] = {"given_rows": "data/given.jsonl"} | sections["data"]
    return found


@pytest.fixture
def write(folder: Path) -> Callable[..., Path]:
    """`write(train={"lr": 1e-5})` writes BASE with those fields changed; a field set to Ellipsis is
    left out.
    """

    def write_config(name: str = "run.yaml", **sections: Mapping[str, Any]) -> Path:
        merged = {
            key: {**BASE.get(key, {}), **sections.get(key, {})} for key in {**BASE, **sections}
        }
        if (row := ROWS.get(merged["train"]["alg_name"])) is not None and row.recipe not in (
            "rl",
            "rejection",
        ):
            merged = {key: value for key, value in merged.items() if key != "reward"}
            merged["data"].pop("prompts_per_step", None)
        if row is not None and row.has(REWARD_PARTS) and "reward" not in sections:
            merged["reward"] = {"parts": {"right": {"name": "math"}, "form": {"name": "format"}}}
        if row is not None and row.gate in AT_RATIO_ONE:
            merged["train"] = {"epochs": 2} | merged["train"]
        if row is not None and "teachers" not in merged["model"]:
            merged = with_teachers(row, merged, folder)
        lines: list[str] = []
        for section, fields in merged.items():
            lines.append(f"{section}:")
            lines += [
                f"  {field}: {json.dumps(value, ensure_ascii=False)}"
                for field, value in fields.items()
                if value is not ...
            ]
        path = folder / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return Path(name)

    return write_config
