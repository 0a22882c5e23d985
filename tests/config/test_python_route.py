"""A configuration made in Python meets every check that one read from a file meets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config, check_config, load_config
from oxrl.errors import ConfigError

Values = dict[str, dict[str, Any]]
BASE: Values = {
    "run": {"name": "made", "steps": 2, "mlflow": False},
    "model": {"name": "builtin:tiny"},
    "data": {"train": "train.jsonl", "prompts_per_step": 4},
    "reward": {"name": "exact"},
    "rollout": {"n_samples": 2, "max_tokens": 4},
    "train": {"alg_name": "sgrpo"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 8)
    return tmp_path


def changed(**sections: dict[str, Any]) -> Values:
    return {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {**BASE, **sections}}


MISTAKES: dict[str, Values] = {
    "train.minibatches": changed(train={"minibatches": 3}),
    "run.steps": changed(train={"epochs": 4}, run={"steps": 3}),
    "rollout.temperature": changed(rollout={"temperature": 0.0}),
    "rollout.n_samples": changed(rollout={"n_samples": 1}),
    "rollout.top_p": changed(rollout={"top_p": 0.9}, train={"loss": "simko"}),
    "rollout.max_tokens": changed(rollout={"max_tokens": 100_000}),
    "data.train": changed(data={"train": "nowhere.jsonl"}),
    "model.name": changed(model={"name": "builtin:tinny"}),
    "reward.name": changed(reward={"name": "exakt"}),
    "run.training_gpus": changed(run={"training_gpus": 2}),
    "lora.rank": changed(
        lora={"rank": 4},
        model={"name": ".", "dtype": "bfloat16"},
        train={"backend": "deepspeed"},
    ),
    "train.clip_dual": changed(train={"clip_dual": 1.05}),
    # Written, and read by nothing in this run.
    "run.eval_every": changed(run={"eval_every": 1}),
    "inference_engine.tensor_parallel": changed(inference_engine={"tensor_parallel": 2}),
}


@pytest.mark.parametrize("field", MISTAKES)
def test_a_mistake_is_refused_whatever_the_route(folder: Path, field: str) -> None:
    values = MISTAKES[field]
    (folder / "run.yaml").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as from_file:
        load_config("run.yaml")
    with pytest.raises(ConfigError) as from_python:
        run(Config.model_validate(values))
    assert field in str(from_file.value)
    rules = [line for line in str(from_file.value).splitlines() if line.startswith("    ")]
    for rule in rules:
        assert rule in str(from_python.value)
    assert not (folder / "runs").exists()


def test_several_mistakes_are_one_error(folder: Path) -> None:
    values = changed(rollout={"n_samples": 1, "temperature": 0.0}, run={"training_gpus": 3})
    with pytest.raises(ConfigError, match="3 problems in the configuration"):
        run(Config.model_validate(values))


def test_a_changed_copy_is_checked_too(folder: Path, write: Callable[[Values], Path]) -> None:
    cfg = load_config(write(BASE))
    copy = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"n_samples": 1})})
    with pytest.raises(ConfigError, match="compares the samples of one prompt"):
        run(copy)


@pytest.fixture
def write(folder: Path) -> Callable[[Values], Path]:
    def write_values(values: Values) -> Path:
        path = folder / "run.yaml"
        path.write_text(json.dumps(values))
        return path

    return write_values


def test_what_a_file_may_say_may_be_said_in_python(folder: Path) -> None:
    check_config(Config.model_validate(BASE))
    check_config(Config.model_validate(changed(data={"eval": "train.jsonl"})))
