"""`oxrl generate --env`: episodes of a model, a run's checkpoint or a config's environment, shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oxrl.cli import app
from oxrl.commands.play import option_overrides, run_play, transcript
from oxrl.commands.train import run
from oxrl.errors import ConfigError, DataError, EnvironmentDefinitionError, OxrlError
from oxrl.types import Sampling
from support.small_runs import rl_config

TALK = """
import random
from oxrl.environments import Step

class Talk:
    def __init__(self, word="go on"):
        self.word = word
    def reset(self, prompt, seed):
        self.chance = random.Random(seed)
        return f"{prompt.messages[0]['content']} {prompt.answer} {self.chance.randint(0, 9)}"
    def step(self, text):
        return Step([{"role": "tool", "content": self.word}], reward=0.5, reason="as ever")
"""
# A stop token ends a turn, which a model without training seldom says.
SHORT = ["rollout.max_tokens=3"]


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("talk.py").write_text(TALK)
    return "talk.py:Talk"


def command(*arguments: str) -> None:
    app(["generate", *arguments], standalone_mode=False)


def test_episodes_are_printed_with_turns_rewards_and_ends(
    talk: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "episodes.jsonl"
    command("builtin:tiny", "--env", talk, "--max-tokens", "3", "--n", "2", "--out", str(out))
    printed = capsys.readouterr().out
    assert printed.count("user: Begin. None ") == 2
    assert printed.count("assistant (turn 1, reward 0.5, as ever): ") == 2
    assert printed.count("tool: go on") == 2
    assert printed.count("[max_tokens, 1 turn, 3 tokens, score 0.5]") == 2
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["sample"], line["end"], line["score"]) for line in lines] == [
        (0, "max_tokens", 0.5),
        (1, "max_tokens", 0.5),
    ]
    # The same seed of the environment for all samples of a prompt, another for each response.
    assert lines[0]["opening"] == lines[1]["opening"]
    assert lines[0]["turns"] != lines[1]["turns"]


def test_rows_reach_the_environment_and_options_its_class(talk: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one", "answer": 1}\n{"prompt": "two", "answer": 2}\n')
    overrides = [*SHORT, *option_overrides(["word='well: so'"])]
    played = run_play("builtin:tiny", talk, rows, overrides, sampling=Sampling())
    assert [episode["opening"][0]["content"][:6] for episode in played] == ["one 1 ", "two 2 "]
    assert played[0]["turns"][0]["messages"][0]["content"] == "well: so"
    again = run_play("builtin:tiny", talk, rows, overrides, sampling=Sampling())
    assert again == played


def test_a_run_is_played_with_its_newest_checkpoint_and_its_own_environment(
    talk: str, tmp_path: Path
) -> None:
    cfg = rl_config(
        tmp_path,
        "run",
        ["run.steps=1", "run.checkpoint_every=1"],
        environment={"name": talk, "options": {"word": "mine"}, "max_turns": 1},
        reward={"name": ""},
        train={"alg_name": "sgrpo", "lr": 1e-9},  # an untrained model says no stop token
    )
    run(cfg)
    folder = str(cfg.run.directory)
    (episode,) = run_play(folder, folder, ["x"], [], sampling=Sampling(temperature=0))
    assert episode["turns"][0]["messages"][0]["content"] == "mine"
    assert episode["tokens"] == 6
    checkpoint = str(max((cfg.run.directory / "checkpoints").glob("step_*")))
    (same,) = run_play(checkpoint, folder, ["x"], [], sampling=Sampling(temperature=0))
    assert same == episode


def test_an_episode_whose_environment_fails_is_shown_without_a_score() -> None:
    turn = {"text": "hm", "reward": 0.0, "reason": "", "messages": ()}
    episode: dict[str, Any] = {
        "opening": [{"role": "user", "content": "Go."}],
        "turns": [turn, turn],
        "end": "environment_error",
        "reason": "step raised ValueError: no",
        "score": None,
        "tokens": 2,
    }
    assert transcript(episode).splitlines()[-1] == (
        "[environment_error, 2 turns, 2 tokens, no score: step raised ValueError: no]"
    )


@pytest.mark.parametrize(
    ("environment", "options", "error", "problem"),
    [
        ("talk.py:Tall", [], ConfigError, "did you mean 'Talk'"),
        ("tol", [], ConfigError, "textarena, tools or path.py:Class"),
        ("none.yaml", [], ConfigError, "no such file|No such file"),
        ("talk.py:Talk", ["wort=x"], EnvironmentDefinitionError, "wort"),
        ("talk.py:Talk", ["word"], ConfigError, "write NAME=VALUE"),
        ("talk.py:Talk", ["word=[1"], ConfigError, "is no YAML"),
    ],
)
def test_what_cannot_be_played_says_what_to_write(
    talk: str, environment: str, options: list[str], error: type[OxrlError], problem: str
) -> None:
    with pytest.raises(error, match=problem) as caught:
        overrides = [*SHORT, *option_overrides(options)]
        run_play("builtin:tiny", environment, ["x"], overrides, sampling=Sampling())
    assert caught.value.exit_code == 2


def test_a_config_without_an_environment_and_options_without_one_are_refused(
    talk: str, tmp_path: Path
) -> None:
    cfg = rl_config(tmp_path, "plain")
    config = next(tmp_path.glob("*.yaml"))
    assert not cfg.environment.name
    with pytest.raises(ConfigError, match=r"has no environment\.name"):
        run_play("builtin:tiny", str(config), ["x"], [], sampling=Sampling())
    with pytest.raises(Exception, match="is for episodes: add --env"):
        command("builtin:tiny", "--prompt", "x", "--max-turns", "2")
    with pytest.raises(DataError, match="no prompt"):
        command("builtin:tiny")
