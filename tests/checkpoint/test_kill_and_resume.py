"""kill -9 at any instant and --resume gives the run that was never killed, byte for byte."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from oxrl.config import Config
from support.killed_runs import (
    DEADLINE_S,
    killed_until_done,
    run_in_child,
    start_run,
    uninterrupted,
)
from support.small_runs import (
    final_files,
    metric_lines,
    model_that_stops,
    preference_config,
    rl_config,
    sft_config,
)
from support.toy_columns import run_recording_in_child


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """On disk: these tests are about what is left there."""
    return disk_path


def _assert_same(killed: Path, whole: Path) -> None:
    assert metric_lines(killed) == metric_lines(whole)
    samples = "samples.jsonl"
    assert (killed / samples).read_bytes() == (whole / samples).read_bytes()
    left, right = final_files(killed), final_files(whole)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


@pytest.mark.timeout(600)
def test_a_reinforcement_run_killed_ten_times_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    sections = {
        "run": {"steps": 44, "checkpoint_every": 3},
        "train": {"alg_name": "sgrpo", "lr": 1e-3, "epochs": 2},
    }
    whole, killed = (
        rl_config(tmp_path, name, run=sections["run"] | {"name": name}, train=sections["train"])
        for name in ("whole", "killed")
    )
    uninterrupted(whole)
    hits = killed_until_done(killed, kills=10, seed=int(os.environ.get("OXRL_KILL_SEED", "0")))
    assert len(hits) >= 10, hits
    _assert_same(killed.run.directory, whole.run.directory)


def pieces_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "reference").glob("[!.]*")}


def _read_slowly(cfg: Config, piece: int, seconds: float) -> None:
    """A run whose reference is kept in pieces of `piece` units, each written after a while."""
    from oxrl.recipes import preference_reference, row_cache

    write = row_cache.write_piece

    def write_later(path: Path, tensors: dict[str, Tensor]) -> None:
        time.sleep(seconds)
        write(path, tensors)

    preference_reference.UNITS_PER_PIECE = piece
    row_cache.write_piece = write_later
    run_in_child(cfg)


@pytest.mark.timeout(600)
def test_a_reference_goes_on_behind_its_last_whole_piece(tmp_path: Path) -> None:
    overrides = ["run.steps=5", "run.checkpoint_every=0", "data.rows_per_step=7"]
    whole = preference_config(tmp_path, "whole", overrides)
    killed = preference_config(tmp_path, "killed", overrides)
    process = start_run(whole, _read_slowly, 7, 0.0)
    process.join(DEADLINE_S)
    pieces = pieces_of(whole.run.directory)
    assert len(pieces) == 5  # 35 of 40 rows: those that are drawn

    process = start_run(killed, _read_slowly, 7, 0.3)
    deadline = time.monotonic() + DEADLINE_S
    while len(pieces_of(killed.run.directory)) < 2:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(DEADLINE_S)
    kept = pieces_of(killed.run.directory)
    assert 2 <= len(kept) < 5
    assert kept.items() <= pieces.items()

    folder = killed.run.directory / "reference"
    sound, damaged, *_ = sorted(kept)
    written = (folder / sound).stat().st_mtime_ns
    (folder / damaged).write_bytes(kept[damaged][:-1] + b"?")
    process = start_run(killed, _read_slowly, 7, 0.0)
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    assert pieces_of(killed.run.directory) == pieces
    assert (folder / sound).stat().st_mtime_ns == written
    log = (killed.run.directory / "run.log").read_text()
    assert f"{damaged} is damaged and computed again" in log
    _assert_same(killed.run.directory, whole.run.directory)


@pytest.mark.timeout(600)
def test_a_run_that_samples_ahead_resumes_exactly(tmp_path: Path) -> None:
    rollout = {
        "max_tokens": 6,
        "n_samples": 4,
        "max_staleness": 3,
        "rounds": 3,
        "force_strict_on_policy": False,
    }
    whole, killed = (
        rl_config(
            tmp_path, name, run={"name": name, "steps": 12, "checkpoint_every": 3}, rollout=rollout
        )
        for name in ("whole", "killed")
    )
    uninterrupted(whole)
    assert killed_until_done(killed, kills=2, seed=4)
    _assert_same(killed.run.directory, whole.run.directory)


def _columns_killed(folder: Path, kind: str, *, kills: int, steps: int) -> list[str]:
    """A run that records toy columns, killed and resumed, against one that was not: columns and
    batches are in its records. Where it was killed.
    """
    sections: dict[str, dict[str, Any]] = {
        "rollout": {
            "max_tokens": 6,
            "n_samples": 4,
            "max_staleness": 3,
            "rounds": 3,
            "force_strict_on_policy": False,
        }
    }
    if kind == "episodes":
        (folder / "talk.py").write_text(TALK)
        sections = {
            "environment": {
                "name": f"{folder / 'talk.py'}:Talk",
                "max_turns": 3,
                "options": {"pids": str(folder)},
            },
            "reward": {"name": ""},
            "rollout": {"max_tokens": 8, "n_samples": 2, "context": {"window": 2}},
            "data": {"prompts_per_step": 2},
            "model": {"name": str(model_that_stops(folder / "model"))},
            "train": {"lr": 1e-5},
        }
    run = {"steps": steps, "checkpoint_every": 3, "record": "tokens"}
    whole, killed = (rl_config(folder, name, run=run, **sections) for name in ("whole", "killed"))
    uninterrupted(whole, run_recording_in_child)
    hits = killed_until_done(
        killed,
        kills=kills,
        seed=int(os.environ.get("OXRL_KILL_SEED", "0")),
        body=run_recording_in_child,
    )
    assert len(hits) >= kills, hits
    _assert_same(killed.run.directory, whole.run.directory)
    left, right = (
        {path.name: path.read_bytes() for path in cfg.run.directory.glob("rollouts/step_*")}
        for cfg in (killed, whole)
    )
    assert left.keys() == right.keys() and len(left) == 3 * steps
    assert [name for name in left if left[name] != right[name]] == []
    return hits


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ahead", "episodes"])
def test_a_run_with_columns_killed_twice_equals_the_uninterrupted_one(
    kind: str, tmp_path: Path
) -> None:
    _columns_killed(tmp_path, kind, kills=2, steps=8)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["ahead", "episodes"])
def test_a_run_with_columns_killed_ten_times_equals_the_uninterrupted_one(
    kind: str, tmp_path: Path
) -> None:
    _columns_killed(tmp_path, kind, kills=10, steps=44)


@pytest.mark.timeout(600)
def test_a_run_with_a_critic_and_a_reference_resumes_exactly(tmp_path: Path) -> None:
    train = {
        "alg_name": "ppo",
        "lr": 1e-3,
        "critic_lr": 1e-3,
        "kl": "loss_k3_plus",
        "kl_coeff": 0.1,
        "minibatches": 2,
    }
    # What the rewards were so far is a state of the run as well.
    reward = {"normalize": "running", "clip": 2.0}
    whole, killed = (
        rl_config(tmp_path, name, run={"name": name, "steps": 8}, train=train, reward=reward)
        for name in ("whole", "killed")
    )
    uninterrupted(whole)
    assert killed_until_done(killed, kills=2, seed=1)
    _assert_same(killed.run.directory, whole.run.directory)
    seen = json.loads(final_files(whole.run.directory)["rewards/moments.json"])
    assert seen["count"] == 4 * 4 * 4  # two optimizer steps for each of 4 rollout batches


@pytest.mark.timeout(600)
def test_a_supervised_run_resumes_exactly(tmp_path: Path) -> None:
    whole, killed = (
        sft_config(tmp_path, name, run={"name": name, "steps": 16, "checkpoint_every": 4})
        for name in ("whole", "killed")
    )
    uninterrupted(whole)
    assert killed_until_done(killed, kills=2, seed=7)
    _assert_same(killed.run.directory, whole.run.directory)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "algorithm",
    [
        "dpo",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("beta_dpo", "tr_dpo", "reward_model")
        ),
    ],
)
def test_a_preference_run_resumes_exactly(tmp_path: Path, algorithm: str) -> None:
    train = {"alg_name": algorithm, "lr": 1e-3} | (
        {"reference_sync_steps": 4} if algorithm == "tr_dpo" else {}
    )
    data = {"eval": str(tmp_path / "held_out_pairs.jsonl"), "eval_rows": 8}
    whole, killed = (
        preference_config(
            tmp_path,
            name,
            run={
                "name": name,
                "steps": 16,
                "checkpoint_every": 3,
                "eval_every": 7,
                "keep_best": True,
            },
            train=train,
            data=data,
        )
        for name in ("whole", "killed")
    )
    uninterrupted(whole)
    assert killed_until_done(killed, kills=2, seed=3)
    _assert_same(killed.run.directory, whole.run.directory)


# An environment that says where its processes are.
TALK = """
import os, random
from oxrl.environments import Step

class Talk:
    def __init__(self, pids=""):
        open(os.path.join(pids, f"{os.getpid()}-{os.getppid()}"), "w").close()
    def reset(self, prompt, seed):
        self.chance = random.Random(seed)
        return f"{prompt.messages[0]['content']} {self.chance.randint(0, 9)}"
    def step(self, text):
        return Step(f"go on {self.chance.randint(0, 9)}", reward=len(set(text)) / 10)
"""


def _episodes_killed(folder: Path, *, kills: int, steps: int) -> None:
    """A run with episodes of several rows, killed and resumed, against one that was not."""
    (folder / "talk.py").write_text(TALK)
    model_that_stops(folder / "model")
    configs: list[Config] = []
    for name in ("whole", "killed"):
        (folder / f"{name}.pids").mkdir()
        options = {"pids": str(folder / f"{name}.pids")}
        configs.append(
            rl_config(
                folder,
                name,
                environment={
                    "name": f"{folder / 'talk.py'}:Talk",
                    "max_turns": 3,
                    "options": options,
                },
                reward={"name": ""},
                rollout={"max_tokens": 8, "n_samples": 2, "context": {"window": 2}},
                data={"prompts_per_step": 2},
                model={"name": str(folder / "model")},
                train={"lr": 1e-5},
                run={"steps": steps, "checkpoint_every": 3},
            )
        )
    whole, killed = configs
    uninterrupted(whole)
    hits = killed_until_done(killed, kills=kills, seed=int(os.environ.get("OXRL_KILL_SEED", "0")))
    assert len(hits) >= kills, hits
    _assert_same(killed.run.directory, whole.run.directory)
    samples = _lines(whole.run.directory / "samples.jsonl")
    assert any(len(sample["turns"]) > 1 for sample in samples if sample["step"] == 1)
    pids = {int(pid) for path in folder.glob("*.pids/*") for pid in path.name.split("-")}
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes of environments are left: {left}"
        time.sleep(0.1)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(300)
def test_a_run_with_episodes_killed_twice_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    _episodes_killed(tmp_path, kills=2, steps=8)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_run_with_episodes_killed_ten_times_equals_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    _episodes_killed(tmp_path, kills=10, steps=80)
