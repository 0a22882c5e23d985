"""Runs with episodes that are in flight while a batch trains give the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config
from support.action_runs import make_data, reinforcement
from support.continuous_runs import run_continuously, use
from support.killed_runs import killed_until_done, uninterrupted
from support.small_runs import check_same, final_files, metric_lines, model_that_stops, rl_config

pytestmark = pytest.mark.filterwarnings("ignore")
# What a run counts of its sampler's work: without a lag some rounds pass at other times.
COUNTED = ("rollout/", "throughput/", "waste/", "work/")
# A model at random calls no tool, so what it writes is put into a call.
CALCULATES = """
import json
import random
from oxrl.environments.tool_environment import ToolEnvironment

class Calculates(ToolEnvironment):
    def __init__(self):
        super().__init__(["calculator"])
    def reset(self, prompt, seed):
        self.chance = random.Random(seed)
        self.most = self.chance.randint(1, 5)
        return prompt.messages
    def step(self, text):
        if self.calls == self.most:
            return super().step("the answer")
        expression = f"{self.chance.randint(2, 99)} * {sum(map(ord, text))}"
        call = {"name": "calculator", "arguments": {"expression": expression}}
        return super().step(f"<tool_call>{json.dumps(call)}</tool_call>")
"""


def calculator(folder: Path, name: str, *, ahead: int, steps: int, every: int) -> Config:
    (folder / "mine.py").write_text(CALCULATES)
    if not (folder / "model").is_dir():
        model_that_stops(folder / "model")
    return rl_config(
        folder,
        name,
        ["inference_engine.max_rows=6", f"run.checkpoint_every={every}"],
        environment={"name": f"{folder / 'mine.py'}:Calculates", "max_turns": 4, "alive": 7},
        rollout=staleness(ahead) | {"max_tokens": 12, "n_samples": 4},
        model={"name": str(folder / "model")},
        run={"steps": steps, "eval_every": 1, "keep_checkpoints": steps},
        data={"prompts_per_step": 2, "eval": str(folder / "prompts.jsonl"), "eval_rows": 2},
    )


def actions(folder: Path, name: str, *, ahead: int, steps: int, every: int) -> Config:
    """Frames, and turns that are actions: a row per turn."""
    if not (folder / "data").is_dir():
        make_data(folder)
    data = {"train": str(folder / "data" / "rl.jsonl"), "prompts_per_step": 2}
    data |= {"eval": str(folder / "data" / "rl.jsonl"), "eval_rows": 2}
    return reinforcement(
        folder,
        name,
        rollout=staleness(ahead),
        environment={"alive": 3},  # a turn of one token takes one round, for however many rows
        run={
            "steps": steps,
            "checkpoint_every": every,
            "eval_every": 1,
            "keep_checkpoints": steps,
        },
        data=data,
    )


def staleness(ahead: int) -> dict[str, Any]:
    return {"max_staleness": ahead, "force_strict_on_policy": ahead == 0}


KINDS = {"calculator": calculator, "actions": actions}


def in_flight(run_dir: Path) -> int:
    """The turns of episodes in flight at all checkpoints."""
    found = 0
    for path in (run_dir / "checkpoints").glob("step_*/samples/samples.json"):
        engine = json.loads(path.read_text())["engine"]
        found += sum(len(episode["turns"]) for episode in engine["episodes"])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_with_episodes_in_flight_are_equal(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    one, other = (KINDS[kind](tmp_path, name, ahead=2, steps=5, every=2) for name in "ab")
    run(one)
    run(other)
    check_same(one.run.directory, other.run.directory)
    lines = metric_lines(one.run.directory)
    assert 1 <= max(line["data/staleness_max"] for line in lines) <= 2
    assert in_flight(one.run.directory) > 0
    written = (one.run.directory / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in written]
    assert max(len(sample["turns"]) for sample in samples) > 2
    assert any(len(sample["versions"]) > 1 for sample in samples)
    # Also what an episode showed last is kept, for a run that goes on to train on it.
    shown = {name for sample in samples for name in images_in(sample)}
    kept = {path.name for path in (one.run.directory / "images").glob("*")}
    assert shown <= kept and bool(shown) == (kind == "actions")


def images_in(sample: dict[str, Any]) -> list[str]:
    """Names of the images that an environment showed."""
    said = [*sample["opening"], *(m for turn in sample["turns"] for m in turn["messages"])]
    parts = [
        part
        for message in said
        if isinstance(message["content"], list)
        for part in message["content"]
    ]
    return [part["image"] for part in parts if part["type"] == "image"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_lag_they_are_those_of_the_sequential_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = (KINDS[kind](tmp_path, name, ahead=0, steps=3, every=3) for name in "ab")
    run(plain)
    use(monkeypatch)
    run(ours)
    one, other = plain.run.directory, ours.run.directory
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    theirs = final_files(other)
    del theirs["samples/samples.json"]
    assert final_files(one) == theirs
    for left, right in zip(metric_lines(one), metric_lines(other), strict=True):
        assert {key: value for key, value in left.items() if not key.startswith(COUNTED)} == {
            key: value for key, value in right.items() if not key.startswith(COUNTED)
        }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [pytest.param("calculator", marks=pytest.mark.full), "actions"])
def test_a_run_killed_while_episodes_are_in_flight_equals_the_uninterrupted_one(
    kind: str, tmp_path: Path
) -> None:
    whole, killed = (KINDS[kind](tmp_path, name, ahead=2, steps=7, every=1) for name in "ab")
    uninterrupted(whole, run_continuously)
    killed_until_done(killed, kills=3, seed=5, body=run_continuously)
    check_same(killed.run.directory, whole.run.directory)
    assert in_flight(whole.run.directory) > 0
