"""A checkpoint that is read is not pruned meanwhile, and a killed run leaves what a quiet one does."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import oxrl
from oxrl.checkpoint.targets import find_target
from oxrl.checkpoint.writer import remove_old
from oxrl.commands.evaluate import run_eval, run_generate
from oxrl.commands.play import run_play
from oxrl.runs.checkpoints import locked
from oxrl.types import Sampling
from support.command_line import forked
from support.command_line import oxrl as command
from support.figures import THREADS

ROWS = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(4)]
Values = dict[str, dict[str, Any]]


def config(folder: Path, name: str = "run", **run: Any) -> Values:
    run = {"name": name, "dir": str(folder / name), "steps": 3, "checkpoint_every": 1} | run
    return {
        "run": run | {"mlflow": False, "threads": THREADS},
        "model": {"name": "builtin:tiny"},
        "data": {"prompts_per_step": 2},
        "reward": {"name": "exact"},
        "rollout": {"n_samples": 2, "max_tokens": 4},
        "train": {"alg_name": "sgrpo"},
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that keeps all its checkpoints."""
    place = tmp_path_factory.mktemp("pins")
    oxrl.train(config(place, keep_checkpoints=9), dataset=ROWS)
    return place / "run"


def steps_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.mark.parametrize("named", ["run", "checkpoints", "checkpoint"])
def test_what_is_read_stays_and_the_others_go(whole: Path, tmp_path: Path, named: str) -> None:
    run = copied(whole, tmp_path)
    checkpoints = run / "checkpoints"
    *_, third, last = steps_in(run)
    shutil.rmtree(checkpoints / last)
    given = {"run": run, "checkpoints": checkpoints, "checkpoint": checkpoints / third}[named]
    with ExitStack() as pins:
        assert Path(find_target(given, pins).model).name == third
        shutil.copytree(checkpoints / third, checkpoints / last)
        remove_old(checkpoints, 3, keep=1)
        assert steps_in(run) == [third, last]
    remove_old(checkpoints, 3, keep=1)
    assert steps_in(run) == [last]


def test_nothing_is_removed_while_somebody_looks_for_the_newest(
    whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    with locked(run):
        remove_old(run / "checkpoints", 3, keep=1)
        assert len(steps_in(run)) == 4
    remove_old(run / "checkpoints", 3, keep=1)
    assert len(steps_in(run)) == 1


# A reward that plays the run that goes on: a newer checkpoint, and all others removed.
PRUNES = """
from pathlib import Path
import shutil
from oxrl.checkpoint.writer import remove_old
from oxrl.runs.checkpoints import list_checkpoints

def score(prompt, completion):
    root = Path({root!r})
    found = [path for step, path in list_checkpoints(root) if step == 3]
    newer = root / "step_00000099"
    if found and not newer.exists():
        shutil.copytree(found[0], newer)
    remove_old(root, 99, keep=1)
    return float([step for step, _ in list_checkpoints(root)] == [3, 99])
"""


def test_an_evaluation_of_a_run_that_goes_on_keeps_its_checkpoint(
    whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:1]))
    (tmp_path / "prunes.py").write_text(PRUNES.format(root=str(run / "checkpoints")))
    overrides = [f"reward.name={tmp_path}/prunes.py:score", f"data.eval={tmp_path}/rows.jsonl"]
    overrides += ["reward.workers=1"]
    assert run_eval(run, overrides, samples=1)["eval/reward"] == 1.0
    remove_old(run / "checkpoints", 99, keep=1)
    assert steps_in(run) == ["step_00000099"]


# An environment that does the same.
PLAYS = """
from oxrl.environments import Step

class Made:
    def reset(self, prompt, seed):
        self.worth = score(None, None)
        return "go"
    def step(self, text):
        return Step("", self.worth, terminated=True)
"""


def test_an_episode_of_a_run_that_goes_on_keeps_its_checkpoint(whole: Path, tmp_path: Path) -> None:
    run = copied(whole, tmp_path)
    source = PRUNES.format(root=str(run / "checkpoints")) + PLAYS
    (tmp_path / "prunes.py").write_text(source)
    sampling = Sampling(max_tokens=4)
    played = run_play(str(run), f"{tmp_path}/prunes.py:Made", ["go"], [], sampling=sampling)
    assert played[0]["score"] == 1.0


class Prompts(list[str]):
    """Prompts that do the same when they are read."""

    checkpoints: Path

    def __iter__(self) -> Iterator[str]:
        newer = self.checkpoints / "step_00000099"
        shutil.copytree(self.checkpoints / "step_00000003", newer)
        remove_old(self.checkpoints, 99, keep=1)
        return super().__iter__()


def test_generating_from_a_run_that_goes_on_keeps_its_checkpoint(
    whole: Path, tmp_path: Path
) -> None:
    run = copied(whole, tmp_path)
    prompts = Prompts(["1+1?"])
    prompts.checkpoints = run / "checkpoints"
    run_generate(str(run), prompts, sampling=Sampling(max_tokens=2))
    assert steps_in(run) == ["step_00000003", "step_00000099"]


# Stops for ever where the last save of a run is about to remove what it replaced.
def stops_in_its_last_removal(made: Values, here: Path) -> None:
    rename = os.rename

    def stopped(source: Path, place: Path) -> None:
        if ".tmp-removed-step_00000002" in str(place):
            here.touch()
            time.sleep(600)
        rename(source, place)

    os.rename = stopped
    oxrl.train(made, dataset=ROWS)


def test_a_run_killed_in_its_last_removal_leaves_no_more_than_a_quiet_one(tmp_path: Path) -> None:
    made = config(tmp_path, keep_checkpoints=1)
    here = tmp_path / "here"
    process = forked(stops_in_its_last_removal, made, here)
    process.start()
    while not here.exists():
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    run = tmp_path / "run"
    assert len(steps_in(run)) > 1 and not (run / "result.json").exists()
    oxrl.train(made, dataset=ROWS, resume=True)
    assert steps_in(run) == ["step_00000003"]


def test_a_run_directory_is_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made = config(tmp_path, steps=1, dir=str(tmp_path / "a" / "b"))
    made["data"]["train"] = str(tmp_path / "rows.jsonl")
    (tmp_path / "run.yaml").write_text(json.dumps(made))
    assert command("train", "run.yaml", folder=tmp_path).returncode == 0
    oxrl.train(config(tmp_path, "given", steps=1), dataset=ROWS)
    for run in (tmp_path / "a" / "b", tmp_path / "given"):
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
    # A directory that was there stays as its owner made it.
    (tmp_path / "open").mkdir(mode=0o755)
    oxrl.train(config(tmp_path, "open", steps=1), dataset=ROWS)
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o755
