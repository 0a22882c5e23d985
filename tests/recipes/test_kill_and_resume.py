"""kill -9 at any instant and --resume gives the run that was never killed, byte for byte."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from small_runs import final_files, metric_lines, preference_config, rl_config, sft_config

from oxrl.config import Config

DEADLINE_S = 120.0


def _run_in_child(cfg: Config) -> None:
    """Body of the forked process that is going to be killed."""
    from oxrl.recipes import run

    os.setpgid(0, 0)
    run(cfg, resume=True)


def _start(cfg: Config) -> multiprocessing.process.BaseProcess:
    # The fork server has everything imported, so that a killed run costs a second and not ten.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["oxrl.recipes.rl", "oxrl.recipes.supervised", "oxrl.recipes.preference"]
    )
    process = context.Process(target=_run_in_child, args=(cfg,))
    process.start()
    return process


def _kill_when(
    process: multiprocessing.process.BaseProcess, run: Path, moment: str, chance: random.Random
) -> str:
    """Wait for `moment` of the run, then SIGKILL it. Says what it hit, or "finished" when the run
    was faster.
    """
    metrics, checkpoints = run / "metrics.jsonl", run / "checkpoints"
    lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    wanted = lines + chance.randint(1, 3)
    deadline = time.monotonic() + DEADLINE_S
    while process.is_alive():
        assert time.monotonic() < deadline, f"the run did not reach {moment} in {DEADLINE_S} s"
        if moment == "checkpoint":
            if checkpoints.is_dir() and any(
                name.startswith(".tmp") for name in os.listdir(checkpoints)
            ):
                if metrics.exists() and metrics.stat().st_size:
                    time.sleep(chance.uniform(0, 0.02))
                    break
        elif metrics.exists() and metrics.read_bytes().count(b"\n") >= wanted:
            time.sleep(chance.uniform(0, 0.25))  # somewhere in the next rollout, reward or update
            break
        time.sleep(0.0005)
    if not process.is_alive():
        return "finished"
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(DEADLINE_S)
    return moment


def _uninterrupted(cfg: Config) -> None:
    process = _start(cfg)
    process.join(DEADLINE_S)
    assert process.exitcode == 0


def _killed_until_done(cfg: Config, *, kills: int, seed: int) -> list[str]:
    """Kill the run `kills` times at random moments, resuming in between, then let it finish."""
    chance = random.Random(seed)
    hits: list[str] = []
    while len(hits) < kills:
        moment = chance.choice(["checkpoint", "anywhere", "anywhere"])
        hit = _kill_when(process := _start(cfg), cfg.run.directory, moment, chance)
        process.join(DEADLINE_S)
        if hit == "finished":
            assert process.exitcode == 0
            break
        hits.append(hit)
    _uninterrupted(cfg)
    return hits


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
        "run": {"steps": 160, "checkpoint_every": 3},
        "train": {"alg_name": "sgrpo", "lr": 1e-3, "epochs": 2},
    }
    whole, killed = (
        rl_config(tmp_path, name, run=sections["run"] | {"name": name}, train=sections["train"])
        for name in ("whole", "killed")
    )
    _uninterrupted(whole)
    hits = _killed_until_done(killed, kills=10, seed=int(os.environ.get("OXRL_KILL_SEED", "0")))
    assert len(hits) >= 10, hits
    _assert_same(killed.run.directory, whole.run.directory)


@pytest.mark.timeout(600)
def test_a_run_that_samples_ahead_resumes_exactly(tmp_path: Path) -> None:
    rollout = {"max_tokens": 6, "n_samples": 4, "max_staleness": 3, "force_strict_on_policy": False}
    whole, killed = (
        rl_config(
            tmp_path, name, run={"name": name, "steps": 40, "checkpoint_every": 3}, rollout=rollout
        )
        for name in ("whole", "killed")
    )
    _uninterrupted(whole)
    assert _killed_until_done(killed, kills=3, seed=4)
    _assert_same(killed.run.directory, whole.run.directory)


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
    whole, killed = (
        rl_config(tmp_path, name, run={"name": name, "steps": 16}, train=train)
        for name in ("whole", "killed")
    )
    _uninterrupted(whole)
    assert _killed_until_done(killed, kills=3, seed=1)
    _assert_same(killed.run.directory, whole.run.directory)


@pytest.mark.timeout(600)
def test_a_supervised_run_resumes_exactly(tmp_path: Path) -> None:
    whole, killed = (
        sft_config(tmp_path, name, run={"name": name, "steps": 60, "checkpoint_every": 5})
        for name in ("whole", "killed")
    )
    _uninterrupted(whole)
    assert _killed_until_done(killed, kills=3, seed=2)
    _assert_same(killed.run.directory, whole.run.directory)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["dpo", "beta_dpo", "tr_dpo", "reward_model"])
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
                "steps": 40,
                "checkpoint_every": 3,
                "eval_every": 7,
                "keep_best": True,
            },
            train=train,
            data=data,
        )
        for name in ("whole", "killed")
    )
    _uninterrupted(whole)
    assert _killed_until_done(killed, kills=4 if algorithm == "dpo" else 2, seed=3)
    _assert_same(killed.run.directory, whole.run.directory)
