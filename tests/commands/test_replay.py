"""`oxrl replay`: an untouched record is equal in every sample and update, a tampered one is not."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from oxrl import train
from oxrl.cli import app
from oxrl.commands.replay import compare_samples, compare_update, go_through, replay
from oxrl.commands.train import run
from oxrl.errors import RunDirectoryError
from oxrl.runs.recorder import load_tensors, save_tensors
from support.small_runs import preference_config, rl_config, sft_config


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two minibatches on every batch: ratios differ from 1."""
    folder = tmp_path_factory.mktemp("recorded")
    train = {"alg_name": "sgrpo", "lr": 1e-3, "minibatches": 2, "kl_coeff": 0.1}
    cfg = rl_config(folder, "run", run={"record": "tokens", "steps": 8}, train=train)
    run(cfg)
    return cfg.run.directory


def test_fifty_samples_and_five_updates_of_an_untouched_run_are_equal(recorded: Path) -> None:
    seen = go_through(recorded, last_step=8, begin=0)
    places = [(step, place) for step in range(1, 8, 2) for place in range(16)]
    for step, place in random.Random(0).sample(places, 50):
        (found,) = compare_samples(recorded, seen, step, only=place, tolerance=0.0)
        assert found.equal and "text and tokens" in found.what, found
    for step in (1, 3, 5, 6, 8):
        findings = list(compare_update(recorded, seen, step, tolerance=0.0))
        assert len(findings) == 3 and all(finding.equal for finding in findings), findings


def test_every_token_has_its_numbers(recorded: Path) -> None:
    batch = load_tensors(recorded / "rollouts" / "step_00000002.safetensors")
    update = load_tensors(recorded / "rollouts" / "step_00000002.update.safetensors")
    mask = batch["response_mask"]
    assert {name: value.shape for name, value in update.items()} == dict.fromkeys(
        ("logprobs", "entropy", "ratio", "kl"), mask.shape
    )
    assert torch.allclose(
        update["ratio"][mask], (update["logprobs"] - batch["old_logprobs"])[mask].exp()
    )
    assert (update["ratio"][mask] != 1).any() and (update["entropy"][mask] > 0).all()
    assert not any(value[~mask].any() for value in update.values())


def tampered(recorded: Path, copy: Path, what: str) -> None:
    """A copy of the run in which one thing of step 7, or of its samples, is another."""
    shutil.copytree(recorded, copy)
    if what == "token":
        file = copy / "rollouts" / "step_00000006.safetensors"
        tensors = load_tensors(file)
        tensors["tokens"][0, -1] += 1
        tensors["advantages"][1] += 0.5
        save_tensors(tensors, file)
        return
    file = copy / ("metrics.jsonl" if what == "update/grad_norm" else "samples.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    line = next(line for line in lines if line["step"] == 7)
    line[what] = line[what] + ("x" if what == "response" else 0.01)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("what", ["token", "response", "reward", "update/grad_norm"])
def test_a_tampered_record_is_different(recorded: Path, tmp_path: Path, what: str) -> None:
    copy = tmp_path / "copy"
    tampered(recorded, copy, what)
    found = CliRunner().invoke(app, ["replay", str(copy), "--step", "7"])
    assert found.exit_code == 1, found.output
    different = [line for line in found.output.splitlines() if line.startswith("different")]
    named = {"token": "tokens per token"}.get(what, what)
    assert different and any(named in line for line in different)
    if "/" not in what:
        sample = CliRunner().invoke(app, ["replay", str(copy), "--step", "7", "--sample", "0"])
        assert sample.exit_code == 1
        other = CliRunner().invoke(app, ["replay", str(copy), "--step", "7", "--sample", "5"])
        assert other.exit_code == 0 and "equal" in other.output


def test_recipes_that_learn_from_given_rows_are_replayed_too(tmp_path: Path) -> None:
    for config in (sft_config, preference_config):
        cfg = config(tmp_path, config.__name__, ["run.steps=3"])
        run(cfg)
        before = {path: path.stat().st_mtime_ns for path in cfg.run.directory.rglob("*")}
        findings = replay(cfg.run.directory, 3, tolerance=0.0)
        assert [finding.equal for finding in findings] == [True, True]
        assert {path: path.stat().st_mtime_ns for path in cfg.run.directory.rglob("*")} == before


def test_what_cannot_be_replayed_is_said(recorded: Path, tmp_path: Path) -> None:
    wrong: list[tuple[Any, ...]] = [(9, None, "has 1 to 8"), (0, None, "has 1 to 8")]
    wrong += [(2, 0, "no sample of step 2"), (1, 16, "0 to 15"), (1, -1, "0 to 15")]
    for step, sample, text in wrong:
        with pytest.raises(RunDirectoryError, match=text):
            replay(recorded, step, sample)
    with pytest.raises(RunDirectoryError, match="no run directory"):
        replay(tmp_path, 1)
    moved = tmp_path / "moved"
    shutil.copytree(recorded, moved)
    pins = json.loads((moved / "data.json").read_text())
    (moved / "data.json").write_text(json.dumps(dict.fromkeys(pins, "0" * 64)))
    with pytest.raises(RunDirectoryError, match="data.train is not what it was"):
        replay(moved, 8)


def test_a_sample_scored_by_a_function_of_python_is_drawn_again_without_it(tmp_path: Path) -> None:
    """Also one that was drawn after updates by its scores: the record has those."""
    rl_config(tmp_path, "run", ["run.steps=3", "run.checkpoint_every=2"])
    [config] = tmp_path.glob("*.yaml")

    def digits(prompt: Any, completion: str) -> float:
        return sum(character.isdigit() for character in completion[:6]) / 6

    changes = ["~reward.name", "run.steps=3", "run.checkpoint_every=2"]
    done = train(config, overrides=changes, reward=digits)
    for step in (2, 3):
        found = CliRunner().invoke(
            app, ["replay", str(done.path), "--step", str(step), "--sample", "5"]
        )
        assert found.exit_code == 0, found.output
        assert f"sample 5 of step {step}" in found.output and "equal" in found.output
    update = CliRunner().invoke(app, ["replay", str(done.path), "--step", "2"])
    assert update.exit_code != 0


def test_samples_and_metrics_have_one_step_number(recorded: Path) -> None:
    """The first step of two that a batch is learned in, counted from 1."""
    lines = [json.loads(line) for line in (recorded / "samples.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {1, 3, 5, 7}
    metrics = [json.loads(line) for line in (recorded / "metrics.jsonl").read_text().splitlines()]
    for step in (1, 7):
        rewards = [line["reward"] for line in lines if line["step"] == step]
        [line] = [line for line in metrics if line["step"] == step]
        assert line["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
