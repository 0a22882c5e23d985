"""`train.micro_batch_tokens: auto`: a rule when a run begins, noted, and done so ever after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import sft_config

from oxrl.config import Config
from oxrl.config.micro_batch import FIELD, tokens_by_rule
from oxrl.recipes import run
from oxrl.runs.choices import CHOICES_FILE


def choice_of(cfg: Config) -> dict[str, object]:
    return json.loads((cfg.run.directory / CHOICES_FILE).read_text())[FIELD]


def test_the_rule_looks_at_device_and_width(tmp_path: Path) -> None:
    tiny = sft_config(tmp_path, "tiny")
    small = sft_config(tmp_path, "small", ["model.name=builtin:small"])
    assert tokens_by_rule(tiny, on_cpu=True)[0] == 8192
    assert tokens_by_rule(small, on_cpu=True)[0] == 4096
    assert tokens_by_rule(small, on_cpu=False)[0] == 16384


def test_what_was_chosen_is_noted_and_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(sft_config(tmp_path, "noted", ["run.steps=1"]))
    cfg = sft_config(tmp_path, "noted", ["run.steps=2"])
    assert choice_of(cfg)["value"] == 8192

    def never(cfg: Config, *, on_cpu: bool) -> object:
        raise AssertionError("decided again")

    monkeypatch.setattr("oxrl.recipes.micro_batch.tokens_by_rule", never)
    run(cfg, resume=True)
    assert choice_of(cfg)["value"] == 8192


def test_a_run_that_began_with_a_number_keeps_it(tmp_path: Path) -> None:
    run(sft_config(tmp_path, "number", ["run.steps=1", f"{FIELD}=64"]))
    cfg = sft_config(tmp_path, "number", ["run.steps=2", f"{FIELD}=auto"])
    run(cfg, resume=True)
    assert choice_of(cfg) == {"value": 64, "why": "so it was when the run began"}
