"""`train.micro_batch_tokens: auto`: a rule when a run begins, noted, and done so ever after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.micro_batch_rules import FIELD, tokens_by_rule
from oxrl.assembly.opening import session_options
from oxrl.assembly.settle import settle
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.train import trainer
from oxrl.engines.train.micro_batches import PRICES, MicroBatches, own_share
from oxrl.recipes.session import Session
from oxrl.runs.pins import CHOICES_FILE
from oxrl.types import TrainBatch
from support.small_runs import rl_config, sft_config


def choice_of(cfg: Config) -> dict[str, object]:
    return json.loads((cfg.run.directory / CHOICES_FILE).read_text())[FIELD]


def weights_of(cfg: Config) -> bytes:
    checkpoint = cfg.run.directory / "checkpoints" / "step_00000002"
    return (checkpoint / "model.safetensors").read_bytes()


def cuts_of(cfg: Config, *, resume: bool = False) -> list[list[int]]:
    """Run, and say of every batch how many rows its micro-batches had."""
    seen: list[list[int]] = []

    def noted(batch: TrainBatch, shares: list[MicroBatches], **further: Any) -> Any:
        seen.append([len(each.units) for each in shares[0]])
        return own_share(batch, shares, **further)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "own_share", noted)
        run(cfg, resume=resume)
    return seen


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

    monkeypatch.setattr("oxrl.assembly.settle.tokens_by_rule", never)
    run(cfg, resume=True)
    assert choice_of(cfg)["value"] == 8192


def test_a_run_that_began_with_a_number_keeps_it_and_how_it_cut_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Cut by the rule, rows of every length would be a micro-batch of their own.
    monkeypatch.setitem(PRICES, "cpu", 1)
    whole = sft_config(tmp_path, "whole", ["run.steps=2", f"{FIELD}=512"])
    filled = cuts_of(whole)
    assert filled == [[8], [8]]
    by_rule = cuts_of(sft_config(tmp_path, "by_rule", ["run.steps=2"]))
    assert max(map(len, by_rule)) > 1
    run(sft_config(tmp_path, "number", ["run.steps=1", f"{FIELD}=512"]))
    cfg = sft_config(tmp_path, "number", ["run.steps=2", f"{FIELD}=auto"])
    assert cuts_of(cfg, resume=True) == filled[1:]
    assert choice_of(cfg) == {"value": 512, "why": "so it was when the run began"}
    assert weights_of(cfg) == weights_of(whole)


def test_a_driver_without_a_gpu_settles_it_for_ranks_that_have_some(tmp_path: Path) -> None:
    """The head of a cluster may have none; whether the ranks have is found out by them."""
    overrides = ["train.backend=fsdp", "run.training_gpus=2", "run.device=cuda"]
    cfg = rl_config(tmp_path, "head", [*overrides, "inference_engine.actors=1"])
    with Session(session_options(cfg)) as session:
        settled = settle(cfg, session)
    assert choice_of(cfg) == {"value": 16384, "why": "the number for train.backend fsdp"}
    assert Assembly(settled).tokens_at_once == 16384
    assert Assembly(settled).price_of_a_cut == PRICES["cuda"]
