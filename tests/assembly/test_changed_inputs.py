"""A resumed run reads what it read when it started, or says what changed and stops with exit 2."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from oxrl.assembly.pins import inputs_of
from oxrl.checkpoint.model_files import save_model
from oxrl.commands.export import run_export
from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.config import Config, load_config
from oxrl.errors import ConfigError, RunDirectoryError
from oxrl.flat_config import recorded_config
from oxrl.models.load import LoadOptions, load_critic, load_policy, load_tokenizer
from oxrl.runs.pins import Input, input_changes, pin
from support.command_line import oxrl
from support.small_runs import (
    final_files,
    metric_lines,
    preference_config,
    rl_config,
    sft_config,
)

Configure = Callable[..., Config]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny(folder: Path, seed: int = 7) -> str:
    save_model(load_policy("builtin:tiny", LoadOptions(seed=seed)), folder)
    load_tokenizer("builtin:tiny").save_pretrained(folder)
    return str(folder)


def everything(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def starts(cfg: Config) -> list[dict[str, Any]]:
    text = (cfg.run.directory / "starts.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def assert_refused_until_accepted(cfg: Config, name: str, said: str) -> None:
    """Resuming `cfg` is refused for what became of `name`, leaves all as it was, and goes on once
    the change is accepted; after that the new state is what the run was started with.
    """
    before = everything(cfg.run.directory)
    with pytest.raises(RunDirectoryError, match=f"(?s){name}: {said}") as raised:
        run(cfg, resume=True)
    assert raised.value.exit_code == 2
    assert f"--accept-changes={name}" in str(raised.value)
    assert everything(cfg.run.directory) == before
    run(cfg, resume=True, accept=[name])
    last = starts(cfg)[-1]
    assert last["accepted"] == [name] and last["time"]
    assert name in last["input_changes"] or name in last["config_changes"]
    assert (
        f"accepted by --accept-changes) with {name}: "
        in (cfg.run.directory / "run.log").read_text()
    )
    (cfg.run.directory / "result.json").unlink()
    run(cfg, resume=True)
    (cfg.run.directory / "result.json").unlink()
    with pytest.raises(RunDirectoryError, match=f"--accept-changes {name}: it is as it was"):
        run(cfg, resume=True, accept=[name])


def begin(make: Configure, folder: Path, **sections: dict[str, Any]) -> Config:
    """Run a step; the configuration of one more."""
    run(make(folder, "run", ["run.steps=1"], **sections))
    return make(folder, "run", ["run.steps=2"], **sections)


REWARD = (
    "from helpers import value\n\ndef score(prompt, completion):\n    return value(completion)\n"
)
HELPERS = "from deep.inside import share\n\ndef value(text):\n    return share(text)\n"
INSIDE = (
    "from . import names\n\ndef share(text):\n    return sum(c in names.GOOD for c in text) / 9\n"
)


@pytest.fixture
def reward(tmp_path: Path) -> dict[str, Any]:
    """A reward that imports a module beside it, which imports one in a package below."""
    folder = tmp_path / "rewards"
    (folder / "deep").mkdir(parents=True)
    (folder / "mine.py").write_text(REWARD)
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "deep" / "__init__.py").write_text("")
    (folder / "deep" / "inside.py").write_text(INSIDE)
    (folder / "deep" / "names.py").write_text("GOOD = '0123456789'\n")
    (folder / "unrelated.py").write_text("")
    return {"name": f"{folder / 'mine.py'}:score"}


@pytest.mark.parametrize("file", ["mine.py", "deep/names.py"])
def test_a_reward_and_all_that_it_imports_from_its_folder(
    tmp_path: Path, reward: dict[str, Any], file: str
) -> None:
    cfg = begin(rl_config, tmp_path, reward=reward)
    with (tmp_path / "rewards" / file).open("a") as text:
        text.write("# a better reward\n")
    (tmp_path / "rewards" / "unrelated.py").write_text("# no part of it\n")
    assert_refused_until_accepted(cfg, "reward.name", f"{file} sha256 .* then, sha256 .* now")


def test_a_reward_is_read_at_every_start_whatever_the_clock_says_of_its_file(
    tmp_path: Path, reward: dict[str, Any]
) -> None:
    (given,) = [
        x for x in inputs_of(rl_config(tmp_path, "run", reward=reward), {}) if "reward" in x.name
    ]
    then = pin(given, None)
    assert pin(given, then) == then
    file = tmp_path / "rewards" / "helpers.py"
    before = file.stat()
    file.write_text(HELPERS.replace("share(text)", "share(tixt)"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert pin(given, then)["files"] != then["files"]


def test_an_unchanged_run_resumes_without_a_word(
    tmp_path: Path, reward: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    cfg = begin(rl_config, tmp_path, reward=reward)
    for file in (tmp_path / "rewards").rglob("*.py"):
        os.utime(file)  # touched, not changed
    (tmp_path / "rewards" / "unrelated.py").write_text("# no part of it\n")
    with caplog.at_level(logging.WARNING):
        run(cfg, resume=True)
    assert [r.getMessage() for r in caplog.records if "resuming" in r.getMessage()] == [
        "resuming with run.steps: 1 -> 2"
    ]


def test_a_relative_reward_is_the_one_of_the_first_start_wherever_it_is_resumed(
    tmp_path: Path,
) -> None:
    first, other, empty = (tmp_path / name for name in ("first", "other", "empty"))
    reward = {"name": f"{first / 'reward.py'}:digits"}
    config = rl_config(first, "run", run={"steps": 2}, reward=reward)
    assert config.run.steps == 2
    text = (first / "run.yaml").read_text().replace(f"{first / 'reward.py'}", "reward.py")
    (first / "run.yaml").write_text(text)
    started = oxrl("train", "run.yaml", "run.steps=1", folder=first)
    assert started.returncode == 0, started.stderr
    for folder in (other, empty):
        folder.mkdir()
    shutil.copy(first / "reward.py", other)  # the same words elsewhere may read other files
    refused = oxrl("train", first / "run.yaml", "--resume", folder=other)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    for words in (str(first / "reward.py"), str(other / "reward.py"), "--accept-changes=reward.n"):
        assert words in refused.stderr
    missing = oxrl("train", first / "run.yaml", "--resume", folder=empty)
    assert missing.returncode == 2 and "reward.name" in missing.stderr
    assert oxrl("train", "run.yaml", "--resume", folder=first).returncode == 0


RECIPES: dict[str, tuple[Configure, dict[str, dict[str, Any]]]] = {
    "rl with a reference": (
        rl_config,
        {"train": {"alg_name": "sgrpo", "lr": 1e-3, "kl": "loss_k3", "kl_coeff": 0.1}},
    ),
    "ppo": (rl_config, {"train": {"alg_name": "ppo", "lr": 1e-3, "critic_lr": 1e-3}}),
    "sft": (sft_config, {}),
    "sft with an adapter": (sft_config, {"lora": {"rank": 2}}),
    "dpo": (preference_config, {}),
    "reward model": (preference_config, {"train": {"alg_name": "reward_model", "lr": 1e-3}}),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_weights_below_a_run_of_any_recipe(tmp_path: Path, recipe: str) -> None:
    make, sections = RECIPES[recipe]
    if "lora" in sections:
        pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
    sections = {**sections, "model": {"name": save_tiny(tmp_path / "base")}}
    cfg = begin(make, tmp_path, **sections)
    save_tiny(tmp_path / "base", seed=8)
    before = everything(cfg.run.directory)
    with pytest.raises(RunDirectoryError, match=r"model\.name: model\.safetensors sha256"):
        run(cfg, resume=True)
    assert everything(cfg.run.directory) == before
    run(cfg, resume=True, accept=["model.name"])
    assert len(metric_lines(cfg.run.directory)) == 2


def test_rejection_sampling_has_its_reward_and_its_model_pinned(
    tmp_path: Path, reward: dict[str, Any]
) -> None:
    train = {"alg_name": "rft", "lr": 1e-3, "keep_reward": 0.0}
    model = {"name": save_tiny(tmp_path / "base")}
    data = {"train": str(tmp_path / "prompts.jsonl"), "rows_per_step": 4, "prompts_per_step": 4}
    sections = {"train": train, "model": model, "data": data, "reward": reward}
    sections["rollout"] = {"max_tokens": 6, "n_samples": 8}
    rl_config(tmp_path, "inputs")
    run(sft_config(tmp_path, "run", ["run.steps=1"], **sections))
    cfg = sft_config(tmp_path, "run", ["run.steps=2"], **sections)
    with (tmp_path / "rewards" / "helpers.py").open("a") as text:
        text.write("# changed\n")
    save_tiny(tmp_path / "base", seed=8)
    with pytest.raises(RunDirectoryError) as raised:
        run(cfg, resume=True)
    for name in ("model.name", "reward.name"):
        assert f"--accept-changes={name}" in str(raised.value)
    with pytest.raises(RunDirectoryError, match=r"reward\.name: helpers\.py"):
        run(cfg, resume=True, accept=["model.name"])
    run(cfg, resume=True, accept=["model.name", "reward.name"])


def test_a_reward_model(tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    save_model(load_critic("builtin:tiny", LoadOptions(seed=1)), judge)
    load_tokenizer("builtin:tiny").save_pretrained(judge)
    cfg = begin(rl_config, tmp_path, reward={"name": str(judge), "timeout_s": 60})
    critic = load_critic(str(judge))
    with torch.no_grad():
        critic.value_head.bias += 1
    save_model(critic, judge)
    said = r"value_head\.safetensors sha256"
    assert_refused_until_accepted(cfg, "reward.name", said)


def test_chat_templates_wherever_they_come_from(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    own = {"model": {"name": "builtin:tiny", "chat_template": str(tmp_path / "chat.jinja")}}
    cfg = begin(sft_config, tmp_path, **own)
    (tmp_path / "chat.jinja").write_text(TEMPLATE.replace("<|end|>", "<|end|>\n"))
    assert_refused_until_accepted(cfg, "model.chat_template", r"chat\.jinja sha256")

    base = save_tiny(tmp_path / "base")
    of_tokenizer = tmp_path / "base" / "chat_template.jinja"
    assert of_tokenizer.is_file()
    cfg = begin(sft_config, tmp_path / "second", model={"name": base})
    of_tokenizer.write_text(TEMPLATE.replace("<|end|>", "<|end|>\n"))
    assert_refused_until_accepted(cfg, "model.chat_template", r"chat_template\.jinja sha256")

    ours = {"name": base, "chat_template": "qwen3_training"}
    cfg = sft_config(tmp_path / "third", "run", model=ours)
    (pinned,) = [given for given in inputs_of(cfg, {}) if given.name == "model.chat_template"]
    assert list(pinned.files) == ["qwen3.jinja"] and pinned.files["qwen3.jinja"].is_file()

    cfg = begin(sft_config, tmp_path / "fourth", model={"name": base})
    config = tmp_path / "base" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "extra": 1}))
    with pytest.raises(RunDirectoryError, match=r"model\.name: tokenizer_config\.json sha256"):
        run(cfg, resume=True)


def test_the_configuration_of_a_run_that_was_moved_goes_on_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = sft_config(tmp_path, "old", ["run.steps=2"])
    run(cfg)
    moved = tmp_path / "moved"
    cfg.run.directory.rename(moved)
    run(load_config(moved / "config.yaml", ["run.steps=4"]), resume=True)
    assert (moved / "checkpoints" / "step_00000004").is_dir()
    assert not cfg.run.directory.exists()
    assert f"resuming with run.dir: '{cfg.run.directory}' -> '{moved}'" in caplog.text
    elsewhere = load_config(moved / "config.yaml", [f"run.dir={tmp_path / 'new'}"])
    assert elsewhere.run.directory == tmp_path / "new"


CLOCK = (
    "{% if strftime_now is defined %}<|system|>{{ strftime_now('%d %b %Y %H:%M') }}<|end|>"
    "{% endif %}" + TEMPLATE
)


class Later(datetime.datetime):
    """The clock, three days on."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Later:
        return cls(2031, 4, 9, 12, 30, tzinfo=tz)

    @classmethod
    def today(cls) -> Later:
        return cls.now()


def read_later(patch: pytest.MonkeyPatch) -> None:
    """From now on it is another day, for whoever asks."""
    for module in ("oxrl.commands.loop", "oxrl.data.chat"):
        for name in ("date", "datetime"):
            patch.setattr(f"{module}.{name}", Later, raising=False)
    patch.setattr("transformers.utils.chat_template_utils.datetime", Later)


@pytest.mark.parametrize("make", [sft_config, rl_config])
def test_a_template_reads_the_day_of_the_first_start_whenever_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Configure
) -> None:
    (tmp_path / "clock.jinja").write_text(CLOCK)
    model = {"name": "builtin:tiny", "chat_template": str(tmp_path / "clock.jinja")}
    whole = make(tmp_path, "whole", ["run.steps=4", "run.checkpoint_every=2"], model=model)
    run(whole)
    day = datetime.date.today().isoformat()
    assert recorded_config(whole.run.directory)["run.day"] == day
    part = ["run.checkpoint_every=2", "run.steps=2"]
    run(make(tmp_path, "part", part, model=model))
    fixed = make(tmp_path, "fixed", ["run.steps=4", f"run.day={day}"], model=model)
    read_later(monkeypatch)
    resumed = make(tmp_path, "part", ["run.steps=4", "run.checkpoint_every=2"], model=model)
    (resumed.run.directory / "result.json").unlink()
    run(resumed, resume=True)
    run(fixed)
    assert final_files(resumed.run.directory) == final_files(whole.run.directory)
    assert metric_lines(resumed.run.directory) == metric_lines(whole.run.directory)
    assert final_files(fixed.run.directory) == final_files(whole.run.directory)
    assert all(finding.equal for finding in replay(whole.run.directory, 3))
    other = make(tmp_path, "part", ["run.steps=6", "run.day=2031-04-09"], model=model)
    with pytest.raises(RunDirectoryError, match=f"run.day: '{day}' in config.yaml"):
        run(other, resume=True)


def test_a_day_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.day"):
        sft_config(tmp_path, "run", ["run.day=2031-02-30"])


GATE = """
from gate_parts import SIGN

def gate(logprobs, old, advantages, mask, loss_weights, *, correction=None):
    return SIGN * (logprobs * advantages * loss_weights)[mask].sum(), {}
"""


def test_a_loss_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gate.py").write_text(GATE)
    (tmp_path / "gate_parts.py").write_text("SIGN = -1\n")
    train = {"alg_name": "sgrpo", "lr": 1e-3, "loss": f"{tmp_path / 'gate.py'}:gate"}
    cfg = begin(rl_config, tmp_path, train=train)
    (tmp_path / "gate_parts.py").write_text("SIGN = -2\n")
    assert_refused_until_accepted(cfg, "train.loss", r"gate_parts\.py sha256")


def test_a_value_of_the_config_changes_by_name_only(tmp_path: Path) -> None:
    begin(sft_config, tmp_path)
    cfg = sft_config(tmp_path, "run", ["run.steps=2", "train.lr=2e-3"])
    assert_refused_until_accepted(cfg, "train.lr", r"0\.001 in config\.yaml, 0\.002 now")
    assert starts(cfg)[-1]["config_changes"] == {}
    assert starts(cfg)[1]["config_changes"]["train.lr"] == [0.001, 0.002]
    assert "lr: 0.002" in (cfg.run.directory / "config.yaml").read_text()


def test_one_accepted_change_does_not_let_another_pass(
    tmp_path: Path, reward: dict[str, Any]
) -> None:
    begin(rl_config, tmp_path, reward=reward)
    (tmp_path / "rewards" / "mine.py").write_text(REWARD + "# changed\n")
    cfg = rl_config(tmp_path, "run", ["run.steps=2", "train.lr=2e-3"], reward=reward)
    before = everything(cfg.run.directory)
    with pytest.raises(RunDirectoryError, match=r"reward\.name: mine\.py") as raised:
        run(cfg, resume=True, accept=["train.lr"])
    assert "0.002" not in str(raised.value)
    assert everything(cfg.run.directory) == before
    run(cfg, resume=True, accept=["train.lr", "reward.name"])


@pytest.mark.parametrize(
    ("accept", "resume", "said"),
    [
        ("train.lrr", True, "no such field.*did you mean 'train.lr'"),
        ("lr", True, "no such field; write section.field"),
        ("train.lr", False, "add --resume"),
    ],
)
def test_names_that_can_accept_nothing_are_refused_before_anything_starts(
    tmp_path: Path, accept: str, resume: bool, said: str
) -> None:
    cfg = sft_config(tmp_path, "run")
    with pytest.raises(ConfigError, match=said) as raised:
        run(cfg, resume=resume, accept=[accept])
    assert raised.value.exit_code == 2 and not cfg.run.directory.exists()


def test_the_command_line_accepts_by_name(tmp_path: Path) -> None:
    sft_config(tmp_path, "run", ["run.steps=1"])
    assert oxrl("train", "run.yaml", "run.steps=1", folder=tmp_path).returncode == 0
    resumed = ("train", "run.yaml", "train.lr=2e-3", "run.steps=2", "--resume")
    refused = oxrl(*resumed, folder=tmp_path)
    assert refused.returncode == 2
    command = "oxrl train run.yaml train.lr=2e-3 run.steps=2 --resume --accept-changes=train.lr"
    assert command in refused.stderr
    meant = oxrl(*resumed, "--accept-changes", "train.seed", folder=tmp_path)
    assert meant.returncode == 2 and "no such field" in meant.stderr
    vain = oxrl(*resumed, "--accept-changes=train.lr", "--accept-changes=run.seed", folder=tmp_path)
    assert vain.returncode == 2 and "run.seed: it is as it was" in vain.stderr
    assert oxrl(*resumed, "--accept-changes", "train.lr", folder=tmp_path).returncode == 0


def test_a_run_whose_pins_were_deleted_goes_on_with_a_warning_and_is_pinned(
    tmp_path: Path, reward: dict[str, Any]
) -> None:
    model = {"name": save_tiny(tmp_path / "base")}
    cfg = begin(rl_config, tmp_path, reward=reward, model=model)
    (cfg.run.directory / "inputs.json").unlink()
    run(cfg, resume=True)
    log = (cfg.run.directory / "run.log").read_text()
    fields = "model.name, model.chat_template, reward.name;"
    assert f"says what these were when the run began: {fields}" in log
    assert log.count("says what these were") == 1
    (cfg.run.directory / "result.json").unlink()
    (tmp_path / "rewards" / "mine.py").write_text(REWARD + "# changed\n")
    with pytest.raises(RunDirectoryError, match=r"reward\.name: mine\.py"):
        run(cfg, resume=True)
    (cfg.run.directory / "inputs.json").write_text("[")
    with pytest.raises(RunDirectoryError, match="inputs.json is not the JSON written there"):
        run(cfg, resume=True)


def test_a_finished_run_reads_nothing_and_has_nothing_to_do(
    tmp_path: Path, reward: dict[str, Any]
) -> None:
    cfg = rl_config(tmp_path, "run", ["run.steps=1"], reward=reward)
    run(cfg)
    (tmp_path / "rewards" / "mine.py").write_text(REWARD + "# changed\n")
    run(cfg, resume=True)


def test_a_folder_that_is_gone_is_named_with_the_place_that_was_looked_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "models" / "base")
    monkeypatch.chdir(tmp_path)
    cfg = begin(sft_config, tmp_path, model={"name": "models/base"})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    said = f"{tmp_path}/models/base, .* files then, models/base, no files .from {elsewhere}"
    with pytest.raises(RunDirectoryError, match=said):
        run(cfg, resume=True)


OLD = "0123456789abcdef0123456789abcdef01234567"
NEW = "f" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cached model me/tiny at two commits, of which main is the first."""
    folder = tmp_path / "home" / "hub" / "models--me--tiny"
    for commit, seed in ((OLD, 7), (NEW, 8)):
        save_tiny(folder / "snapshots" / commit, seed)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(OLD)
    for module in (constants, "transformers.utils.hub", "huggingface_hub.file_download"):
        for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
            if isinstance(module, str):
                monkeypatch.setattr(f"{module}.{name}", str(folder.parent), raising=False)
            else:
                monkeypatch.setattr(module, name, str(folder.parent), raising=False)
    return folder


@pytest.mark.parametrize("make", [rl_config, sft_config])
def test_a_model_of_the_hub_stays_at_the_commit_that_the_run_began_with(
    tmp_path: Path, cache: Path, make: Configure
) -> None:
    train = {"alg_name": "sgrpo", "lr": 1e-3, "kl": "loss_k3", "kl_coeff": 0.1}
    sections: dict[str, Any] = {"model": {"name": "me/tiny"}, "run": {"steps": 2}}
    if make is rl_config:
        sections["train"] = train
    whole = make(tmp_path, "whole", **sections)
    run(whole)
    noted = json.loads((whole.run.directory / "inputs.json").read_text())["model.name"]
    assert noted["commit"] == OLD and noted["files"] == {}
    run(make(tmp_path, "part", ["run.steps=1"], **sections))
    (cache / "refs" / "main").write_text(NEW)
    part = make(tmp_path, "part", **sections)
    run(part, resume=True)
    assert final_files(part.run.directory) == final_files(whole.run.directory)
    assert metric_lines(part.run.directory) == metric_lines(whole.run.directory)
    # A new run, of the first step: at what main is now, unless the old commit is named.
    sections["run"] = {"steps": 1}
    moved = make(tmp_path, "moved", **sections)
    run(moved)
    first = metric_lines(whole.run.directory)[:1]
    assert metric_lines(moved.run.directory) != first
    old = make(tmp_path, "old", **{**sections, "model": {"name": "me/tiny", "revision": OLD}})
    run(old)
    assert metric_lines(old.run.directory) == first


def test_a_teacher_of_the_hub_stays_at_the_commit_that_the_run_began_with(
    tmp_path: Path, cache: Path
) -> None:
    teachers = {"big": {"name": "me/tiny"}}
    sections: dict[str, Any] = {
        "model": {"name": "builtin:tiny", "teachers": teachers},
        "train": {"alg_name": "opd", "lr": 1e-3},
    }
    whole = rl_config(tmp_path, "whole", ["~reward.name", "run.steps=2"], **sections)
    run(whole)
    noted = json.loads((whole.run.directory / "inputs.json").read_text())
    assert noted["model.teachers.big.name"]["commit"] == OLD
    run(rl_config(tmp_path, "part", ["~reward.name", "run.steps=1"], **sections))
    (cache / "refs" / "main").write_text(NEW)
    part = rl_config(tmp_path, "part", ["~reward.name", "run.steps=2"], **sections)
    run(part, resume=True)
    assert final_files(part.run.directory) == final_files(whole.run.directory)
    assert metric_lines(part.run.directory) == metric_lines(whole.run.directory)
    moved = rl_config(tmp_path, "moved", ["~reward.name", "run.steps=1"], **sections)
    run(moved)
    first = metric_lines(whole.run.directory)[:1]
    assert metric_lines(moved.run.directory) != first
    teachers["big"]["revision"] = OLD
    old = rl_config(tmp_path, "old", ["~reward.name", "run.steps=1"], **sections)
    run(old)
    assert metric_lines(old.run.directory) == first


def test_an_adapter_is_merged_into_the_commit_that_it_was_trained_on(
    tmp_path: Path, cache: Path
) -> None:
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
    cfg = sft_config(tmp_path, "run", ["run.steps=1"], model={"name": "me/tiny"}, lora={"rank": 2})
    run(cfg)
    run_export(cfg.run.directory, tmp_path / "before")
    (cache / "refs" / "main").write_text(NEW)
    run_export(cfg.run.directory, tmp_path / "after")
    for name in ("before", "after"):
        assert (tmp_path / name / "model.safetensors").is_file()
    before = (tmp_path / "before" / "model.safetensors").read_bytes()
    assert (tmp_path / "after" / "model.safetensors").read_bytes() == before


def test_a_model_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny(tmp_path / "base")
    hashed: list[str] = []
    digest = hashlib.file_digest

    def counted(file: Any, algorithm: str) -> Any:
        if str(tmp_path / "base") in str(file.name):
            hashed.append(Path(file.name).name)
        return digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    cfg = begin(sft_config, tmp_path, model={"name": base})
    assert hashed.count("model.safetensors") == 1
    hashed.clear()
    run(cfg, resume=True)
    (cfg.run.directory / "result.json").unlink()
    assert hashed == []
    # A copy has another inode and another time, and the same bytes.
    weights = tmp_path / "base" / "model.safetensors"
    shutil.copy(weights, tmp_path / "copy")
    os.replace(tmp_path / "copy", weights)
    run(cfg, resume=True)
    (cfg.run.directory / "result.json").unlink()
    assert hashed == ["model.safetensors"]
    run(cfg, resume=True)
    (cfg.run.directory / "result.json").unlink()
    assert hashed == ["model.safetensors"]
    # One byte in place: the size is the same, the time is not.
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(RunDirectoryError, match=r"model\.name: model\.safetensors sha256"):
        run(cfg, resume=True)


def test_files_that_options_of_an_environment_name_are_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("passages.jsonl").write_text('{"text": "x"}\n')
    Path("shop.py").write_text("import prices\n\ndef price(what: str) -> int: ...\n")
    Path("prices.py").write_text("")
    specs = [{"name": "search", "file": "passages.jsonl"}, "shop.py:price", "calculator"]
    environment = {"name": "tools", "options": {"tools": specs, "note": "x" * 5000}}
    cfg = rl_config(tmp_path, "run", [], environment=environment)
    (given,) = [each for each in inputs_of(cfg, {}) if each.name == "environment.options"]
    assert [path.name for path in given.files.values()] == [
        "passages.jsonl",
        "prices.py",
        "shop.py",
    ]


@pytest.mark.parametrize("code", [True, False])
def test_the_same_bytes_at_another_place_are_a_change_of_code_alone(
    code: bool, tmp_path: Path
) -> None:
    then, now = tmp_path / "then.py", tmp_path / "now.py"
    noted: list[Any] = []
    for path in (then, now):
        path.write_text("A = 1")
        given = Input(name="reward.name", where=str(path), files={"mine.py": path}, code=code)
        noted.append(pin(given, None) | {"from_run": str(path)})
    changes = list(input_changes(given, *noted))
    assert [(change.name, change.then) for change in changes] == (
        [("reward.name", str(then))] if code else []
    )
    assert list(input_changes(given, noted[0], noted[0])) == []
