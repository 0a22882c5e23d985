"""Teachers before a run: whose tokens they know, whether they agree with themselves, what is pinned
and counted.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.assembly.assemble import NoScores, assemble
from oxrl.assembly.assembly import Assembly
from oxrl.assembly.pins import inputs_of
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.train.local import LocalTrainer
from oxrl.errors import (
    ConfigError,
    DataError,
    EngineError,
    InvariantError,
    RunDirectoryError,
)
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.modelfiles.dims import model_dims
from oxrl.plan.memory import memory
from oxrl.plan.plan import plan_text
from oxrl.plan.preflight import CHECKS, Prepared
from oxrl.runs.clock import Clock
from oxrl.types import Completion, Group, Output, Prompt, TokenBatch, Want
from support.samplers import lively
from support.small_runs import rl_config


def model(folder: Path, seed: int = 5, swapped: tuple[int, int] | None = None) -> str:
    """A model with the built-in tokenizer, two of whose ids may stand for each other."""
    lively("builtin:tiny", seed=seed).save_pretrained(folder)
    builtin_tokenizer().save_pretrained(folder)
    if swapped is not None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        vocab = content["model"]["vocab"]
        names = {index: token for token, index in vocab.items()}
        first, second = swapped
        vocab[names[first]], vocab[names[second]] = second, first
        path.write_text(json.dumps(content))
    return str(folder)


def config(folder: Path, teachers: dict[str, Any], *overrides: str, **sections: Any) -> Config:
    asked = {"name": "builtin:tiny", "teachers": teachers}
    train = {"alg_name": "opd", "lr": 1e-3} | sections.pop("train", {})
    sections = {"run": {"steps": 2, "checkpoint_every": 1}} | sections
    overrides = ("~reward.name", *overrides)
    return rl_config(folder, "run", overrides, model=asked, train=train, **sections)


def prepared(cfg: Config) -> Prepared:
    found = Prepared()
    for subject in ("model", "tokenizer", "data"):
        CHECKS[subject](cfg, found)
    return found


def test_two_ids_that_stand_for_other_tokens_are_named_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(tmp_path, {"big": {"name": model(tmp_path / "big", swapped=(70, 90))}})
    told = r"model\.teachers\.big\.name: .* 2 ids: 70 is 'f' for the policy and 'z' for the teach"
    names = {index: token for token, index in builtin_tokenizer().get_vocab().items()}
    told = told.replace("'f'", repr(names[70])).replace("'z'", repr(names[90]))
    with pytest.raises(ConfigError, match=told):
        CHECKS["teachers"](cfg, prepared(cfg))
    monkeypatch.setattr(Assembly, "model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="2 ids: 70 is"):
        run(cfg)


def test_a_shorter_vocabulary_is_no_teachers(tmp_path: Path) -> None:
    name = model(tmp_path / "big")
    path = tmp_path / "big" / "tokenizer.json"
    content = json.loads(path.read_text())
    longest = max(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    del content["model"]["vocab"][longest]
    path.write_text(json.dumps(content))
    cfg = config(tmp_path, {"big": {"name": name}})
    with pytest.raises(ConfigError, match="has 260 tokens and the policy 261"):
        CHECKS["teachers"](cfg, prepared(cfg))


def test_a_source_without_a_teacher_is_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path, {"big": {"name": model(tmp_path / "big"), "sources": ["algebra"]}})
    rows = [{"prompt": f"{i}+1=", "source": "sums"} for i in range(40)]
    path = Path(cfg.data.train_files[0])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"no teacher names the source 'sums' .* name algebra"):
        CHECKS["teachers"](cfg, prepared(cfg))
    with pytest.raises(DataError, match="no teacher names the source 'sums'"):
        run(cfg)


class Fickle(LocalTrainer):
    """A model that says something else of rows in a batch."""

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        found = super().forward(inputs, want)
        if self.options.trained or len(inputs) == 1 or found.logprobs is None:
            return found
        return Output(logprobs=found.logprobs + 0.01)


def test_a_teacher_that_depends_on_its_batch_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(tmp_path, {"big": {"name": model(tmp_path / "big")}})
    with ExitStack() as stack:
        assert "teacher.big" in assemble(Assembly(cfg), Clock(), stack).models
    monkeypatch.setattr("oxrl.assembly.assembly.LocalTrainer", Fickle)
    told = r"model\.teachers\.big says something else .* alone and in a batch: up to 0\.01 nats"
    with ExitStack() as stack, pytest.raises(EngineError, match=told):
        assemble(Assembly(cfg), Clock(), stack)


def test_a_built_in_teacher_is_not_the_policy_and_frozen_weights_are(tmp_path: Path) -> None:
    hint = tmp_path / "hint.jinja"
    hint.write_text("{{ answer }} {{ prompt }}")
    teachers = {
        "other": {"name": "builtin:tiny", "sources": ["x"]},
        "frozen": {"prompt": str(hint), "reads": ["answer"], "weights": "frozen"},
    }
    trainers = Assembly(config(tmp_path, teachers)).trainers()
    weights = {name: dict(engine.model.named_parameters()) for name, engine in trainers.items()}
    own = weights["policy"]
    assert all(torch.equal(own[name], w) for name, w in weights["teacher.frozen"].items())
    other = weights["teacher.other"]
    assert not torch.equal(own["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_teachers_and_templates_are_pinned(tmp_path: Path) -> None:
    hint = tmp_path / "hint.jinja"
    hint.write_text("{{ answer }} {{ prompt }}")
    big = model(tmp_path / "big")
    teachers = {"big": {"name": big, "sources": ["x"]}, "own": {"prompt": str(hint)}}
    cfg = config(tmp_path, teachers)
    found = {each.name: each for each in inputs_of(cfg, {})}
    assert "model.safetensors" in found["model.teachers.big.name"].files
    assert found["model.teachers.own.prompt"].files == {"hint.jinja": hint}
    run(config(tmp_path, {"big": {"name": big}}))
    lively("builtin:tiny", seed=6).save_pretrained(big)
    with pytest.raises(RunDirectoryError, match=r"model\.teachers\.big\.name: model\.safetensors"):
        run(config(tmp_path, {"big": {"name": big}}, "run.steps=4"), resume=True)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_the_plan_counts_a_teacher_by_its_own_size_and_type(
    dtype: str, width: int, tmp_path: Path
) -> None:
    cfg = config(tmp_path, {"big": {"name": "builtin:small", "dtype": dtype}})
    alone = rl_config(tmp_path, "alone", run={"steps": 2, "checkpoint_every": 1})
    dims, small = model_dims("builtin:tiny"), model_dims("builtin:small")
    assert dims is not None and small is not None
    found, before = memory(cfg, dims), memory(alone, dims)
    assert found.held - before.held == width * small.parameters
    assert found.stored == before.stored
    line = f"teachers    big: builtin:small, as a model of this run, {dtype}, every row"
    assert line in plan_text(cfg).splitlines()


def test_where_there_is_no_reward_nothing_is_said_and_stored_samples_are_never_scored() -> None:
    said = Completion(segments=(), text="2", finish_reason="stop")
    prompt = Prompt(uid="1", messages=(), token_ids=(1, 2))
    groups: list[Group] = [(prompt, [said, said])]
    (scores,) = NoScores(asked=True).score(groups)
    assert [(score.value, score.status) for score in scores] == [(None, "none")] * 2
    with pytest.raises(InvariantError, match=r"rollout\.from_samples without data\.eval"):
        NoScores(asked=False).score(groups)
