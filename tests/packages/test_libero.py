"""LIBERO, offline: demonstrations that succeed again, and runs of a tiny policy from end to end.

Runs where `make env-libero` has put LIBERO:
`.venv-libero/bin/python -m pytest tests/packages/test_libero.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from oxrl.commands.replay import compare_samples, compare_update, go_through
from oxrl.commands.train import run
from oxrl.config import Config, load_config
from oxrl.environments.find import find_environment
from oxrl.types import Prompt
from oxrl_datasets.prepare import PREPARERS
from oxrl_robots.lerobot import read_episodes
from support.small_runs import final_files, metric_lines

ROOT = Path(__file__).resolve().parents[2]
WORLD = f"{ROOT / 'experiments' / 'libero' / 'libero_world.py'}:Libero"
OPTIONS: dict[str, Any] = {"side": 32}
PROMPT = Prompt(uid="p", messages=(), token_ids=())
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("libero") is None, reason="LIBERO is no part here"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(1800),
]


def words(*parts: str | Path) -> subprocess.CompletedProcess[str]:
    """A script of Python in a process of its own, whose renderer is the only one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, parts)],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=1500,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An episode of the expert, and a policy that has imitated it for two steps."""
    found = tmp_path_factory.mktemp("libero")
    told: dict[str, Any] = {"environment": WORLD, "options": json.dumps(OPTIONS), "chunk": 8}
    report = PREPARERS["demonstrations"](
        None, found / "data", episodes=1, eval_rows=1, lerobot=True, **told
    )
    assert report["expert_failed"] == 0 and 80 < report["expert_steps"] < 140
    run(config(found, "sft"))
    return found


def config(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    """Of the experiment, made small."""
    recipe = "sft" if name == "sft" else "rl"
    path = ROOT / "experiments" / "libero" / f"{recipe}.yaml"
    content: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())
    content["run"] |= {"name": name, "dir": str(folder / name), "steps": 2}
    content["data"]["train"] = str(folder / "data" / f"{recipe}.jsonl")
    if recipe == "sft":
        content["action"]["statistics"] = str(folder / "data" / "statistics.json")
    else:
        content["model"]["name"] = str(folder / "sft" / "checkpoints" / "step_00000002")
        content["environment"] |= {"name": WORLD, "max_turns": 2}
        content["environment"]["options"] |= OPTIONS | {"max_steps": 16}
    for section, values in sections.items():
        content[section] |= values
    written = folder / f"{name}.yaml"
    written.write_text(yaml.safe_dump(content))
    return load_config(written)


def test_a_demonstration_succeeds_again_by_its_recorded_actions(folder: Path) -> None:
    """In another process, from the dataset: every frame and state as recorded."""
    [episode] = read_episodes(folder / "data" / "lerobot")
    steps = len(episode.frames)
    assert episode.success and episode.frames[-1].reward == 1.0
    assert episode.task == "pick up the alphabet soup and place it in the basket"
    script = ROOT / "experiments" / "simulators" / "replay.py"
    done = words(script, folder / "data" / "lerobot", WORLD, json.dumps(OPTIONS))
    said = f"{steps} steps, {steps} frames and {steps} states as recorded, success"
    assert said in done.stdout and done.returncode == 0, done.stdout + done.stderr


def test_an_instance_goes_on_from_a_state_and_begins_as_a_new_one_does() -> None:
    chance = np.random.default_rng(0)
    turns = [chance.uniform(-1, 1, (3, 7)).tolist() for _ in range(3)]

    def played(made: Any, actions: list[Any]) -> list[Any]:
        found = [made.act(chunk).messages[0]["content"][0]["image"].copy() for chunk in actions]
        return [*found, made.robot_state()]

    made = find_environment(WORLD)(**OPTIONS)
    made.reset(PROMPT, 3)
    played(made, turns[:1])
    state = made.state()
    expected = played(made, turns[1:])
    # Begun otherwise, with closed fingers, then restored.
    made.reset(PROMPT, 4)
    made.act([[0.0] * 6 + [1.0]] * 5)
    made.restore(state)
    np.testing.assert_equal(played(made, turns[1:]), expected)
    made.close()
    new = find_environment(WORLD)(**OPTIONS)
    new.reset(PROMPT, 3)
    np.testing.assert_equal(played(new, turns)[1:], expected)
    new.close()


def kill_after(cfg: Config, file: Path, lines: int) -> None:
    """Start the run in a process of its own, and end it with SIGKILL."""
    command = [sys.executable, str(ROOT / "main_rl.py"), "--config", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    metrics = cfg.run.directory / "metrics.jsonl"
    deadline = time.monotonic() + 1200
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    assert process.wait(timeout=60) < 0


def test_reinforcement_is_replayed_and_goes_on_after_a_kill_byte_for_byte(folder: Path) -> None:
    known: dict[str, Any] = {"steps": 3, "record": "tokens"}
    whole = config(folder, "whole", run=known)
    run(whole)
    lines = metric_lines(whole.run.directory)
    assert len(lines) == 3
    for line in lines:
        assert line["mismatch/abs_logdiff_max"] <= 1e-5
        assert line["episode/turns"] == 8
        assert line["episode/success"] == 0
        # Two groups of two, of which one at least differs in how far the hand came.
        assert line["update/grad_norm"] > 0
    seen = go_through(whole.run.directory, last_step=2)
    again = [
        *compare_samples(whole.run.directory, seen, 1, tolerance=0.0),
        *compare_update(whole.run.directory, seen, 2, tolerance=0.0),
    ]
    assert len(again) >= 5 and all(finding.equal for finding in again), again
    ended = config(folder, "ended", run=known)
    kill_after(ended, folder / "ended.yaml", 2)
    run(ended, resume=True)
    assert final_files(whole.run.directory) == final_files(ended.run.directory)
    assert lines == metric_lines(ended.run.directory)
    samples = [(cfg.run.directory / "samples.jsonl").read_bytes() for cfg in (whole, ended)]
    assert samples[0] == samples[1]


def test_what_is_not_there_is_refused() -> None:
    make: Any = find_environment(WORLD)
    with pytest.raises(ValueError, match="suite=libero_objects, there are libero_"):
        make(suite="libero_objects")
    with pytest.raises(ValueError, match="task=10, libero_object has 0 to 9"):
        make(task=10)
