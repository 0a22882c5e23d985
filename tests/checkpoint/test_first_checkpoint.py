"""`run.first_checkpoint: reference`: no copy of a model that is its own source."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from oxrl.commands.replay import compare_samples, compare_update, go_through
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import CheckpointError, ConfigError, RunDirectoryError
from oxrl.recipes.session import Session
from support.small_runs import (
    final_files,
    metric_lines,
    model_that_stops,
    preference_config,
    rl_config,
    sft_config,
)

REFERENCE = ["run.first_checkpoint=reference", "run.checkpoint_every=0", "run.steps=2"]
PPO = {"alg_name": "ppo", "lr": 1e-3, "critic_lr": 1e-3, "kl": "loss_k3_plus", "kl_coeff": 0.1}


class Lost(BaseException):
    """What no handler of a run catches, as a power cut."""


def lose_after_one_step(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Session.record

    def lost(self: Session, step: int, *rest: object, **named: object) -> None:
        record(self, step, *rest, **named)
        if step == 1:
            raise Lost

    with monkeypatch.context() as power:
        power.setattr(Session, "record", lost)
        with pytest.raises(Lost):
            run(cfg)


def sft(folder: Path, name: str, more: list[str]) -> Config:
    return sft_config(folder, name, [*more, f"model.name={model_that_stops(folder / 'model')}"])


def ppo(folder: Path, name: str, more: list[str]) -> Config:
    return rl_config(folder, name, more, train=PPO, reward={"normalize": "running"})


def moving_reference(folder: Path, name: str, more: list[str]) -> Config:
    return preference_config(folder, name, more, train={"alg_name": "tr_dpo", "lr": 1e-3})


@pytest.mark.parametrize("kind", [sft, ppo, moving_reference])
def test_a_run_lost_before_its_second_checkpoint_goes_on_as_if_nothing_had_been(
    kind: Callable[[Path, str, list[str]], Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = kind(tmp_path, "whole", REFERENCE[1:])
    run(whole)
    lost = kind(tmp_path, "lost", REFERENCE)
    lose_after_one_step(lost, monkeypatch)
    [first] = (lost.run.directory / "checkpoints").iterdir()
    assert first.name == "step_00000000"
    assert not list(first.rglob("*.safetensors"))
    copied = whole.run.directory / "checkpoints" / first.name
    assert len(list(copied.rglob("reference.json"))) == 0
    named = json.loads((first / "reference.json").read_text())
    assert named["model"] == lost.model.name and named["seed"] == 0
    run(lost, resume=True)
    assert metric_lines(lost.run.directory) == metric_lines(whole.run.directory)
    assert final_files(lost.run.directory) == final_files(whole.run.directory)


def test_another_model_in_the_place_of_the_first_is_refused_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = sft(tmp_path, "changed", REFERENCE)
    lose_after_one_step(cfg, monkeypatch)
    weights = Path(cfg.model.name) / "model.safetensors"
    other = bytearray(weights.read_bytes())
    other[-3] ^= 1
    weights.write_bytes(other)
    with pytest.raises(RunDirectoryError, match=r"model\.name"):
        run(cfg, resume=True)
    with pytest.raises(CheckpointError, match=r"is a reference to the model .*, and its pins was"):
        run(cfg, resume=True, accept=["model.name"])


def test_replay_follows_the_reference(tmp_path: Path) -> None:
    cfg = rl_config(tmp_path, "replayed", REFERENCE)
    run(cfg)
    seen = go_through(cfg.run.directory, last_step=2, begin=0)
    for place in random.Random(1).sample(range(16), 4):
        (found,) = compare_samples(cfg.run.directory, seen, 1, only=place, tolerance=0.0)
        assert found.equal
    findings = list(compare_update(cfg.run.directory, seen, 2, tolerance=0.0))
    assert findings and all(finding.equal for finding in findings)


def test_who_names_the_reference_as_a_model_is_told_what_it_stands_for(tmp_path: Path) -> None:
    cfg = sft(tmp_path, "named", REFERENCE)
    run(cfg)
    copy = tmp_path / "copy"
    shutil.copytree(cfg.run.directory / "checkpoints" / "step_00000000", copy)
    with pytest.raises(ConfigError, match=f"only names its model: '{cfg.model.name}'; give that"):
        sft_config(tmp_path, "other", [f"model.name={copy}"])
