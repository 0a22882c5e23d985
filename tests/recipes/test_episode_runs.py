"""Runs with an environment: one turn equals the reward it wraps, runs resume exactly, and what is
wrong is found before anything is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.errors import ConfigError, EnvironmentDefinitionError
from support.checks_here import planned
from support.rewards_here import DIGITS
from support.small_runs import (
    final_files,
    metric_lines,
    model_that_stops,
    rl_config,
    stop_after_three_steps,
)
from support.talk import TALK

ONE_TURN = f"""{DIGITS}
from oxrl.environments import Step

class Once:
    def reset(self, prompt, seed):
        return prompt.messages
    def step(self, text):
        return Step(reward=digits(None, text), terminated=True)
"""


def sample_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_an_environment_of_one_turn_gives_the_bytes_of_the_reward_it_wraps(tmp_path: Path) -> None:
    plain = rl_config(tmp_path, "plain", ["run.steps=2"])
    (tmp_path / "once.py").write_text(ONE_TURN)
    wrapped = rl_config(
        tmp_path,
        "wrapped",
        ["run.steps=2"],
        environment={"name": f"{tmp_path / 'once.py'}:Once"},
        reward={"name": ""},
    )
    run(plain)
    run(wrapped)
    assert final_files(plain.run.directory) == final_files(wrapped.run.directory)
    ours = metric_lines(wrapped.run.directory)
    for line in ours:
        for name in [name for name in line if name.startswith("episode/")]:
            del line[name]
    assert ours == metric_lines(plain.run.directory)
    for one, other in zip(
        sample_lines(plain.run.directory), sample_lines(wrapped.run.directory), strict=True
    ):
        assert [other[name] for name in one] == [*one.values()]


def test_an_environment_and_a_reward_add_up(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(ONE_TURN)
    both = rl_config(
        tmp_path,
        "both",
        ["run.steps=1", "data.prompts_per_step=1"],
        environment={"name": f"{tmp_path / 'once.py'}:Once"},
    )
    run(both)
    for line in sample_lines(both.run.directory):
        (turn,) = line["turns"]
        assert line["reward"] == pytest.approx(2 * turn["reward"])


@pytest.mark.parametrize(
    ("staleness", "reads"),
    [
        (0, "whole"),
        pytest.param(1, "whole", marks=pytest.mark.full),
        pytest.param(0, "last", marks=pytest.mark.full),
        (1, {"window": 2}),
    ],
)
def test_a_run_with_episodes_resumes_byte_for_byte(
    tmp_path: Path, staleness: int, reads: str | dict[str, int]
) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    model = model_that_stops(tmp_path / "model")
    sections: dict[str, dict[str, Any]] = {
        "environment": {
            "name": f"{tmp_path / 'talk.py'}:Talk",
            "max_turns": 3,
            "options": {"ends": 0},
        },
        "reward": {"name": ""},
        "rollout": {
            "max_tokens": 12,
            "n_samples": 4,
            "context": reads,
            "max_staleness": staleness,
            "force_strict_on_policy": staleness == 0,
            **({"rounds": 3} if staleness else {}),
        },
        "model": {"name": str(model)},
        "data": {"prompts_per_step": 2},
        "run": {"steps": 7, "record": "tokens" if staleness == 0 else "text"},
    }
    whole = rl_config(tmp_path, "whole", **sections)
    cut = rl_config(tmp_path, "cut", **sections)
    run(whole)
    stop_after_three_steps(cut, tmp_path / "cut.yaml")
    run(cut, resume=True)
    assert final_files(whole.run.directory) == final_files(cut.run.directory)
    assert metric_lines(whole.run.directory) == metric_lines(cut.run.directory)
    assert sample_lines(whole.run.directory) == sample_lines(cut.run.directory)
    untrained = [line for line in sample_lines(whole.run.directory) if line["step"] == 1]
    assert max(len(line["turns"]) for line in untrained) == 3
    first = metric_lines(whole.run.directory)[0]
    assert (first["episode/rows"] > 8) == (reads != "whole")
    assert first["data/rows"] == 8  # episodes, whatever they are read in
    assert all(line["end"] for line in sample_lines(whole.run.directory))


# Every second question is worth the same whatever is said, so its group teaches nothing.
UNEVEN = """
import random
from oxrl.environments import Step

class Uneven:
    reusable = True
    def reset(self, prompt, seed):
        self.chance = random.Random(seed)
        self.even = self.chance.random() < 0.5
        return f"{prompt.messages[0]['content']} {self.chance.randint(0, 9)}"
    def step(self, text):
        return Step(f"go on {self.chance.randint(0, 9)}", reward=0.0 if self.even else sum(map(ord, text)) / 1000)
"""


def test_dynamic_sampling_draws_until_enough_groups_of_episodes_differ(tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    cfg = rl_config(
        tmp_path,
        "uneven",
        environment={
            "name": f"{tmp_path / 'uneven.py'}:Uneven",
            "max_turns": 3,
            "timeout_s": 60,
        },
        reward={"name": ""},
        rollout={"max_tokens": 12, "n_samples": 3, "context": "last"},
        model={"name": str(model_that_stops(tmp_path / "model"))},
        data={"prompts_per_step": 3},
        train={"alg_name": "dapo", "lr": 1e-4, "overlong_buffer": 2},
        run={"steps": 3, "checkpoint_every": 0},
    )
    run(cfg)
    samples, lines = sample_lines(cfg.run.directory), metric_lines(cfg.run.directory)
    assert max(line["sampling/rounds"] for line in lines) > 1
    assert max(len(sample["turns"]) for sample in samples if sample["step"] == 1) == 3
    drawn = 0
    for line in lines:
        mine = [sample for sample in samples if sample["step"] == line["step"]]
        worth: dict[int, set[float]] = {}
        for sample in mine:
            worth.setdefault(sample["draw"], set()).add(sample["reward"])
        differ = sorted(draw for draw, values in worth.items() if len(values) > 1)
        trained = sorted({s["draw"] for s in mine if s["advantage"] is not None})
        assert trained == differ[:3]
        assert min(worth) == drawn
        drawn = trained[-1] + 1
        assert line["data/rows"] == 9  # episodes
        assert line["episode/rows"] >= 9
    assert lines[0]["episode/rows"] > 9
    last = lines[-1]
    books = {name: last[name] for name in last if name.startswith("samples/")}
    dispatched = books.pop("samples/dispatched")
    assert dispatched == len(samples) == sum(books.values())
    assert books["samples/trained"] == 3 * 9
    assert books["samples/dropped_uninformative"] > 0


def test_options_of_an_environment_may_hold_lists_and_reach_its_class(tmp_path: Path) -> None:
    options = {"tools": ["calculator"], "max_calls": 3}
    sections: dict[str, Any] = {"environment": {"name": "tools", "options": options}}
    few = ["run.steps=1", "data.prompts_per_step=1", "rollout.n_samples=2"]
    cfg = rl_config(tmp_path, "tools", few, **sections)
    assert cfg.environment.options == options
    run(cfg)
    resolved = (cfg.run.directory / "config.yaml").read_text()
    assert '"tools": ["calculator"]' in resolved
    broken = {"environment": {"name": "tools", "options": {"tools": ["calculater"]}}}
    with pytest.raises(EnvironmentDefinitionError, match="did you mean 'calculator'"):
        run(rl_config(tmp_path, "broken", **broken))


def test_an_evaluation_plays_episodes_too(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(ONE_TURN)
    cfg = rl_config(
        tmp_path,
        "eval",
        environment={"name": f"{tmp_path / 'once.py'}:Once"},
        reward={"name": ""},
        data={"eval": str(tmp_path / "prompts.jsonl"), "eval_rows": 6},
    )
    metrics = run_eval(tmp_path / "eval.yaml", out=tmp_path / "answers.jsonl")
    assert metrics["eval/errors"] == 0
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert all(len(line["turns"]) == 1 for line in lines)
    assert cfg.environment.max_turns == 8


def test_an_environment_that_cannot_begin_is_found_before_the_first_sample(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "class Bad:\n    def reset(self, prompt, seed):\n        raise KeyError('board')\n"
        "    def step(self, text): ...\n"
    )
    cfg = rl_config(
        tmp_path, "bad", environment={"name": f"{tmp_path / 'bad.py'}:Bad"}, reward={"name": ""}
    )
    with pytest.raises(EnvironmentDefinitionError, match=r"reset raised KeyError: 'board'"):
        run(cfg)
    assert not (cfg.run.directory / "samples.jsonl").exists() or not sample_lines(cfg.run.directory)


@pytest.mark.parametrize(
    ("opening", "code", "said"),
    [
        pytest.param("return 'Go.'", 0, "began an episode with 0 tools", marks=pytest.mark.full),
        ("raise KeyError('board')", 2, "reset raised KeyError: 'board'"),
    ],
)
def test_plan_begins_an_episode(tmp_path: Path, opening: str, code: int, said: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"class Made:\n    def reset(self, prompt, seed):\n        {opening}\n"
        "    def step(self, text): ...\n"
    )
    rl_config(
        tmp_path, "plan", environment={"name": f"{tmp_path / 'mine.py'}:Made"}, reward={"name": ""}
    )
    found = planned("plan.yaml", folder=tmp_path)
    assert found.returncode == code, found.stdout + found.stderr
    assert said in " ".join((found.stdout + found.stderr).split())


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"environment": {"name": "toolz"}}, "did you mean 'tools'"),
        ({"environment": {"max_turns": 3}}, "is read with an environment"),
        ({"rollout": {"max_episode_tokens": 9}}, "is read with an environment"),
        ({"rollout": {"context": "last"}}, "is read with an environment"),
        ({"train": {"alg_name": "ppo", "turn_gamma": 0.5}}, "is read with an environment"),
        ({"environment": {"name": "agent"}}, "needs the program"),
        (
            {"environment": {"name": "tools"}, "rollout": {"context": "window: 0"}},
            "must be whole, last or",
        ),
        (
            {"environment": {"name": "tools"}, "rollout": {"context": {"windows": 3}}},
            "must be whole, last or",
        ),
        (
            {
                "environment": {"name": "tools"},
                "rollout": {"context": "last", "rewritten_history": "split"},
            },
            "is read where turns see earlier turns",
        ),
        (
            {"environment": {"name": "tools"}, "reward": {"name": "", "workers": 2}},
            "is read with a reward",
        ),
        (
            {"environment": {"name": "tools"}, "rollout": {"max_episode_tokens": 3}},
            "which bounds one turn",
        ),
        ({"environment": {"name": "tools"}, "train": {"alg_name": "sft"}}, "reinforcement"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    tmp_path: Path, sections: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        rl_config(tmp_path, "wrong", **sections)
