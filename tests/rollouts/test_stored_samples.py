"""Half of reinforcement learning at a time: samples without training, training without samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import ConfigError, OxrlError, RunDirectoryError
from oxrl.rollouts.whole_samples import read_step, written
from oxrl.usercode.messages import encode
from support.small_runs import final_files, metric_lines, model_that_stops, rl_config
from support.talk import TALK
from support.vision_runs import rl as rl_of_images
from support.vision_runs import write_rows

TRAIN = {"alg_name": "sgrpo", "lr": 1e-3, "minibatches": 2, "kl_coeff": 0.1}
# What a run that samples nothing does not count; its waste is a share of less.
OF_SAMPLERS = ("rollout/", "sync/", "waste/", "work/")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Four optimizer steps on two rollout batches, every sample kept whole."""
    folder = tmp_path_factory.mktemp("recorded")
    cfg = rl_config(folder, "run", run={"record": "tokens", "steps": 4}, train=TRAIN)
    run(cfg)
    return cfg


def again(recorded: Config, name: str, *overrides: str, **sections: dict[str, Any]) -> Config:
    """The same run on the samples of the first, in a directory of its own."""
    folder = recorded.run.directory.parent
    stored = f"rollout.from_samples={recorded.run.directory}"
    sections = {"run": {"record": "tokens", "steps": 4}, "train": TRAIN} | sections
    return rl_config(folder, name, [stored, *overrides], **sections)


def trained(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if not key.startswith(OF_SAMPLERS)}
        for line in lines
    ]


def no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("nothing is to be sampled")

    monkeypatch.setattr("oxrl.engines.sample.sampler.ModuleSampler.submit", refuse)


def test_training_on_stored_samples_is_the_run_that_drew_them(
    recorded: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_sampler(monkeypatch)
    monkeypatch.setattr("oxrl.assembly.assemble.start_rewards", lambda cfg, *rest: None)
    cfg = again(recorded, "again")
    run(cfg)
    first = recorded.run.directory
    second = cfg.run.directory
    assert final_files(first) == final_files(second)
    assert trained(metric_lines(first)) == trained(metric_lines(second))
    assert (first / "samples.jsonl").read_bytes() == (second / "samples.jsonl").read_bytes()
    kept = sorted(path.name for path in (second / "rollouts").iterdir())
    assert kept == sorted(path.name for path in (first / "rollouts").iterdir())
    for name in kept:
        assert (first / "rollouts" / name).read_bytes() == (second / "rollouts" / name).read_bytes()


def whole_and_stored(first: Config, second: Config) -> None:
    """Run both: the second trains on what the first drew, and every file says the same."""
    one = first.run.directory
    two = second.run.directory
    run(second)
    assert final_files(one) == final_files(two)
    assert trained(metric_lines(one)) == trained(metric_lines(two))
    assert (one / "samples.jsonl").read_bytes() == (two / "samples.jsonl").read_bytes()


@pytest.mark.parametrize("reads", ["whole", pytest.param("last", marks=pytest.mark.full)])
def test_training_on_stored_episodes_is_the_run_that_played_them(
    reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    sections: dict[str, dict[str, Any]] = {
        "environment": {"name": f"{tmp_path / 'talk.py'}:Talk", "max_turns": 3},
        "reward": {"name": ""},
        "rollout": {"max_tokens": 12, "n_samples": 2, "context": reads},
        "model": {"name": str(model_that_stops(tmp_path / "model"))},
        "run": {"record": "tokens", "steps": 4},
        "train": TRAIN,
    }
    played = rl_config(tmp_path, "played", **sections)
    run(played)
    lines = (played.run.directory / "samples.jsonl").read_text().splitlines()
    untrained = [sample for sample in map(json.loads, lines) if sample["step"] == 1]
    assert len({len(sample["turns"]) for sample in untrained}) > 1
    stored = f"rollout.from_samples={played.run.directory}"
    no_sampler(monkeypatch)
    whole_and_stored(played, rl_config(tmp_path, "stored", [stored], **sections))
    monkeypatch.undo()
    halves = rl_config(tmp_path, "halves", ["run.only=rollouts"], **sections)
    run(halves)
    found = [finding.equal for finding in replay(halves.run.directory, 4, tolerance=0.0)]
    assert found == [True]
    again = f"rollout.from_samples={halves.run.directory}"
    run(rl_config(tmp_path, "again", [again, "run.steps=2"], **sections))


@pytest.mark.filterwarnings("ignore")
def test_training_on_stored_samples_with_images_is_the_run_that_drew_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path)
    sections: dict[str, Any] = {"run": {"record": "tokens"}, "train": {"minibatches": 2}}
    drawn = rl_of_images(tmp_path, "drawn", **sections)
    run(drawn)
    no_sampler(monkeypatch)
    source = {"from_samples": str(drawn.run.directory)}
    whole_and_stored(drawn, rl_of_images(tmp_path, "stored", rollout=source, **sections))


def test_another_algorithm_trains_on_the_same_samples_and_is_replayed(recorded: Config) -> None:
    train = {"alg_name": "dapo", "lr": 2e-3, "minibatches": 2}
    cfg = again(recorded, "dapo", train=train)
    run(cfg)
    assert final_files(cfg.run.directory) != final_files(recorded.run.directory)
    lines = (cfg.run.directory / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line)["response"] for line in lines]
    lines = (recorded.run.directory / "samples.jsonl").read_text().splitlines()
    assert samples == [json.loads(line)["response"] for line in lines]
    findings = replay(cfg.run.directory, 4, tolerance=0.0)
    assert findings and all(finding.equal for finding in findings)


def test_samples_without_training_can_be_trained_on(tmp_path: Path) -> None:
    halves = {"record": "tokens", "steps": 4, "checkpoint_every": 2}
    cfg = rl_config(tmp_path, "only", ["run.only=rollouts"], run=halves, train=TRAIN)
    run(cfg)
    found = cfg.run.directory
    lines = metric_lines(found)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert not any("update/loss" in line for line in lines)
    assert lines[0]["reward/mean"] > 0 and lines[0]["data/tokens"] > 0
    samples = [json.loads(line) for line in (found / "samples.jsonl").read_text().splitlines()]
    assert {line["step"] for line in samples} == {1, 3}
    assert all(line["advantage"] is None and line["reward"] is not None for line in samples)
    begun = found / "checkpoints" / "step_00000002" / "model.safetensors"
    last = found / "checkpoints" / "step_00000004" / "model.safetensors"
    assert begun.read_bytes() == last.read_bytes()
    stored = rl_config(
        tmp_path, "train", [f"rollout.from_samples={found}"], run={"steps": 4}, train=TRAIN
    )
    run(stored)
    assert len(metric_lines(stored.run.directory)) == 4
    assert [finding.equal for finding in replay(found, 4, tolerance=0.0)] == [True]
    (sample,) = replay(found, 3, 3, tolerance=0.0)
    assert sample.equal


def test_a_stopped_collection_of_samples_goes_on_with_the_same_ones(tmp_path: Path) -> None:
    halves = {"record": "tokens", "steps": 6, "checkpoint_every": 2}
    whole = rl_config(tmp_path, "whole", ["run.only=rollouts"], run=halves)
    run(whole)
    parts = rl_config(tmp_path, "parts", ["run.only=rollouts", "run.steps=2"], run=halves)
    run(parts)
    run(rl_config(tmp_path, "parts", ["run.only=rollouts"], run=halves), resume=True)
    for name in ("samples.jsonl", *(f"rollouts/step_0000000{n}.samples.jsonl" for n in range(6))):
        one = (whole.run.directory / name).read_bytes()
        assert one == (parts.run.directory / name).read_bytes()


def test_a_step_reads_back_as_it_was_written(recorded: Config) -> None:
    path = recorded.run.directory / "rollouts" / "step_00000002.samples.jsonl"
    found = read_step(path)
    assert b"".join(map(encode, written(found))) == path.read_bytes()
    assert len(found.rollouts) == 16 and found.rollouts[0].score.value is not None


Refused = tuple[str, list[str], str]
REFUSED: list[Refused] = [
    ("more steps", ["run.steps=6"], "set it to 4 or less"),
    ("temperature", ["rollout.temperature=0.5"], "was 1.0 when the samples"),
    ("group size", ["rollout.n_samples=2"], "was 4 when the samples"),
    ("prompts", ["data.prompts_per_step=2"], "was 4 when the samples"),
    ("reward", ["reward.name=exact"], "when the samples"),
    ("updates", ["train.minibatches=1"], "was 2 when the samples"),
    ("model", ["model.name=builtin:small"], "was 'builtin:tiny' when the samples"),
    ("nothing sampled", ["run.only=rollouts"], "leave one of them out"),
]


@pytest.mark.parametrize("case", REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_decides_about_samples_must_be_as_it_was(recorded: Config, case: Refused) -> None:
    name, overrides, text = case
    with pytest.raises(ConfigError, match=text):
        again(recorded, name.replace(" ", "-"), *overrides)


def _no_run(cfg: Config) -> None:
    (cfg.run.directory / "config.yaml").unlink()


def _text_alone(cfg: Config) -> None:
    for path in (cfg.run.directory / "rollouts").iterdir():
        path.unlink()
    file = cfg.run.directory / "config.yaml"
    file.write_text(file.read_text().replace('record: "tokens"', 'record: "text"'))


@pytest.mark.parametrize(
    ("break_it", "text"), [(_no_run, "is no run directory"), (_text_alone, "recorded text")]
)
def test_a_run_without_whole_samples_is_refused(
    tmp_path: Path, break_it: Callable[[Config], None], text: str
) -> None:
    cfg = rl_config(tmp_path, "run", run={"record": "tokens", "steps": 1})
    run(cfg)
    break_it(cfg)
    with pytest.raises(ConfigError, match=text):
        rl_config(tmp_path, "b", [f"rollout.from_samples={cfg.run.directory}"], run={"steps": 1})


def test_damaged_and_missing_samples_are_named(recorded: Config, tmp_path: Path) -> None:
    path = recorded.run.directory / "rollouts" / "step_00000002.samples.jsonl"
    damaged = tmp_path / path.name
    damaged.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunDirectoryError, match=r"step_00000002\.samples.*not samples as runs"):
        read_step(damaged)
    with pytest.raises(RunDirectoryError, match="cannot be read: No such file"):
        read_step(tmp_path / "step_00000004.samples.jsonl")


def test_a_baseline_that_was_not_sampled_is_asked_for(tmp_path: Path) -> None:
    cfg = rl_config(tmp_path, "run", ["run.only=rollouts"], run={"record": "tokens", "steps": 1})
    run(cfg)
    stored = f"rollout.from_samples={cfg.run.directory}"
    train = {"alg_name": "remax", "lr": 1e-3}
    with pytest.raises(OxrlError, match="no greedy response"):
        run(rl_config(tmp_path, "remax", [stored], run={"steps": 1}, train=train))


def test_the_command_line_says_both_in_a_word(recorded: Config) -> None:
    folder = recorded.run.directory.parent
    config = str(folder / "run.yaml")
    runner = CliRunner()
    stored = ["--from-samples", str(recorded.run.directory), f"run.dir={folder / 'word'}"]
    found = runner.invoke(app, ["train", config, *stored])
    assert found.exit_code == 0, found.output
    assert final_files(folder / "word") == final_files(recorded.run.directory)
    only = ["--rollout-only", "run.steps=2", f"run.dir={folder / 'half'}"]
    assert runner.invoke(app, ["train", config, *only]).exit_code == 0
    both = runner.invoke(app, ["train", config, "--rollout-only", *stored])
    assert "leave one of them out" in str(both.exception)
    dry = runner.invoke(app, ["train", config, "--dry-run", *stored])
    assert "a dry run samples" in str(dry.exception)
