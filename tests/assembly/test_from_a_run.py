"""`model.name` and `reward.name` take the directory of a run: its best or its newest checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from oxrl.commands.scored_again import load_reward_config
from oxrl.commands.train import run
from oxrl.config import Config, load_config
from oxrl.config.sections.model import told_origin
from oxrl.errors import ConfigError
from oxrl.plan.plan import plan_text
from support.small_runs import preference_config, rl_config, sft_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A supervised run of four steps without a best checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    cfg = sft_config(folder, "sft", ["run.steps=4"])
    run(cfg)
    return cfg.run.directory


@pytest.fixture
def sft(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "sft"))


def pinned(cfg: Config, field: str = "model.name") -> str:
    return json.loads((cfg.run.directory / "inputs.json").read_text())[field]["where"]


def test_a_run_named_as_the_model_stands_for_its_newest_checkpoint_and_the_run_says_so(
    sft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = sft / "checkpoints" / "step_00000004"
    cfg = rl_config(tmp_path, "rl", ["run.steps=2"], model={"name": str(sft)})
    said = f"begins with what a run learned, as it is in {newest}"
    assert said in plan_text(cfg)
    run(cfg)
    assert said in capsys.readouterr().out
    assert pinned(cfg) == str(newest)
    assert str(newest) in (cfg.run.directory / "config.yaml").read_text()


def test_the_folder_of_checkpoints_stands_for_the_same(sft: Path, tmp_path: Path) -> None:
    cfg = preference_config(tmp_path, "dpo", model={"name": str(sft / "checkpoints")})
    assert cfg.model.name == str(sft / "checkpoints" / "step_00000004")


def test_the_best_evaluation_is_taken_where_a_run_keeps_it(tmp_path: Path) -> None:
    held_out = {"train": f"{tmp_path}/chats.jsonl", "eval": f"{tmp_path}/chats.jsonl"}
    kept = ["run.steps=4", "run.keep_best=true", "run.eval_every=2"]
    first = sft_config(tmp_path, "sft", kept, data=held_out)
    run(first)
    best = first.run.directory / "best"
    cfg = rl_config(tmp_path, "rl", ["run.steps=2"], model={"name": str(first.run.directory)})
    assert cfg.model.name == str(best)
    assert f"begins with what a run learned, as it is in {best}" in plan_text(cfg)
    run(cfg)
    assert pinned(cfg) == str(best)


def test_a_resumed_run_keeps_the_checkpoint_that_it_began_with(sft: Path, tmp_path: Path) -> None:
    """The run that it comes from went on meanwhile."""
    older = sft / "checkpoints" / "step_00000002"
    newer = sft / "checkpoints" / "step_00000004"
    aside = newer.rename(tmp_path / "aside")
    cfg = rl_config(tmp_path, "rl", ["run.steps=2"], model={"name": str(sft)})
    assert cfg.model.name == str(older)
    run(cfg)
    aside.rename(newer)
    [config] = tmp_path.glob("rl.yaml")
    again = load_config(config, ["run.steps=2"])
    assert again.model.name == str(older)
    run(again, resume=True)
    another = load_config(config, ["run.steps=2", "run.name=another", f"run.dir={tmp_path}/other"])
    assert another.model.name == str(newer)


def test_a_run_without_a_checkpoint_is_a_problem_beside_the_others(
    sft: Path, tmp_path: Path
) -> None:
    shutil.rmtree(sft / "checkpoints")
    (sft / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*has no checkpoint.*train\.lr"):
        rl_config(tmp_path, "rl", ["train.lr=fast"], model={"name": str(sft)})


def test_a_damaged_best_is_told_instead_of_something_else_taken(sft: Path, tmp_path: Path) -> None:
    best = Path(shutil.copytree(sft / "checkpoints" / "step_00000004", sft / "best"))
    weights = best / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="is damaged or cut off"):
        rl_config(tmp_path, "rl", model={"name": str(sft)})


def test_a_model_folder_that_holds_checkpoints_of_its_own_is_a_model(
    sft: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(sft / "checkpoints" / "step_00000004", tmp_path / "model"))
    shutil.copytree(sft / "checkpoints", model / "checkpoints")
    assert rl_config(tmp_path, "rl", model={"name": str(model)}).model.name == str(model)


def test_a_run_that_trained_a_reward_model_scores_by_its_checkpoint(tmp_path: Path) -> None:
    judge = preference_config(
        tmp_path, "rm", ["run.steps=2"], train={"alg_name": "reward_model", "lr": 1e-3}
    )
    run(judge)
    place = str(judge.run.directory)
    newest = str(judge.run.directory / "checkpoints" / "step_00000002")
    alone = rl_config(tmp_path, "rl", ["run.steps=1"], reward={"name": place})
    assert alone.reward.name == newest
    run(alone)
    assert pinned(alone, "reward.name") == newest
    parts = f"reward.parts={{liked: {{name: {place}}}, right: {{name: math}}}}"
    several = rl_config(tmp_path, "parts", ["~reward.name", parts])
    assert [part.name for part in several.reward.parts.values()] == [newest, "math"]


def test_a_resume_says_from_where_it_goes_on_or_that_it_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = sft_config(tmp_path, "sft", ["run.steps=2"])
    run(cfg, resume=True)
    assert f"{cfg.run.directory} has no checkpoint to go on from: it starts anew" in (
        capsys.readouterr().out
    )
    longer = sft_config(tmp_path, "sft", ["run.steps=3"])
    run(longer, resume=True)
    told = capsys.readouterr().out
    assert "resuming after step 2 from" in told and "anew" not in told
    run(longer, resume=True)
    assert "is already complete; nothing to do" in capsys.readouterr().out
    fresh = sft_config(tmp_path, "another", ["run.steps=1"])
    run(fresh)
    assert "anew" not in capsys.readouterr().out


def reward_model(folder: Path) -> tuple[Path, Path, Path]:
    """A run of a reward model, its newest checkpoint, and the place of a later one that is aside
    as `aside`.
    """
    train = {"alg_name": "reward_model", "lr": 1e-3}
    every = ["run.steps=2", "run.checkpoint_every=1"]
    cfg = preference_config(folder, "rm", every, train=train)
    run(cfg)
    older = cfg.run.directory / "checkpoints" / "step_00000001"
    newer = cfg.run.directory / "checkpoints" / "step_00000002"
    newer.rename(folder / "aside")
    return cfg.run.directory, older, newer


def test_a_resumed_run_keeps_the_checkpoint_of_a_part_of_its_reward(tmp_path: Path) -> None:
    place, older, newer = reward_model(tmp_path)
    parts = {"liked": {"name": str(place)}, "right": {"name": "math"}}
    cfg = rl_config(tmp_path, "rl", ["run.steps=1", "~reward.name"], reward={"parts": parts})
    run(cfg)
    (tmp_path / "aside").rename(newer)
    [config] = tmp_path.glob("rl.yaml")
    again = load_config(config, ["run.steps=2", "~reward.name"])
    assert again.reward.parts["liked"].name == str(older)
    run(again, resume=True)


def test_a_score_is_by_the_checkpoint_that_the_named_run_has_now(tmp_path: Path) -> None:
    place, older, newer = reward_model(tmp_path)
    cfg = rl_config(tmp_path, "rl", ["run.steps=1"], reward={"name": str(place)})
    run(cfg)
    (tmp_path / "aside").rename(newer)
    own = cfg.run.directory / "config.yaml"
    assert load_reward_config(own, []).reward.name == str(older)
    assert load_reward_config(own, [f"reward.name={place}"]).reward.name == str(newer)


def test_a_name_that_is_no_folder_is_not_told_to_be_of_the_run_around_it(
    sft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sft)
    assert told_origin("builtin:tiny") == ""
    assert told_origin("checkpoints/step_00000004").startswith("begins with what a run learned")
