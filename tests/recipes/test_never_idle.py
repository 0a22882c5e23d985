"""Whole runs whose sampler goes on while a batch trains give the same bytes every time."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config
from support.continuous_runs import run_continuously, use
from support.killed_runs import killed_until_done, start_run, uninterrupted
from support.small_runs import check_same, final_files, metric_lines, model_that_stops, rl_config

# What a run counts of its sampler's work: without a lag some rounds pass at other times.
COUNTED = ("rollout/", "throughput/", "waste/", "work/")
KINDS: dict[str, dict[str, Any]] = {
    "sgrpo": {"train": {"alg_name": "sgrpo", "lr": 1e-3}},
    "two minibatches": {"train": {"alg_name": "sgrpo", "lr": 1e-3, "minibatches": 2}},
    "dapo": {"train": {"alg_name": "dapo", "lr": 1e-3, "overlong_buffer": 2}},
    "remax": {"train": {"alg_name": "remax", "lr": 1e-3}},
}


def config(folder: Path, name: str, kind: str, *, ahead: int, steps: int = 8) -> Config:
    sections = {key: dict(values) for key, values in KINDS[kind].items()}
    updates = sections["train"].get("minibatches", 1)
    rollout = {
        "max_tokens": 12,
        "n_samples": 4,
        "max_staleness": ahead * updates,
        "force_strict_on_policy": ahead == 0,
    }
    model = {"name": str(folder / "model")}
    if not (folder / "model").is_dir():
        model_that_stops(folder / "model")
    return rl_config(
        folder,
        name,
        ["inference_engine.max_rows=6", "run.checkpoint_every=3"],
        rollout=rollout,
        model=model,
        run={"steps": steps},
        **sections,
    )


def signalled_after_three_steps(cfg: Config) -> None:
    """SIGTERM somewhere in the fourth step, or in its evaluation."""
    process = start_run(cfg, run_continuously)
    lines = cfg.run.directory / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not lines.exists() or lines.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.001)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lag_is_bounded_and_a_signal_changes_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    whole = config(tmp_path, "whole", kind, ahead=2)
    cut = config(tmp_path, "cut", kind, ahead=2)
    run(whole)
    signalled_after_three_steps(cut)
    run(cut, resume=True)
    check_same(whole.run.directory, cut.run.directory)
    lines = metric_lines(whole.run.directory)
    assert 1 <= max(line["data/staleness_max"] for line in lines) <= whole.rollout.max_staleness
    written = (whole.run.directory / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in written]
    if kind != "dapo":  # weights came in between
        assert any(len(sample["versions"]) > 1 for sample in samples)
        assert sum(line["data/mixed_versions_frac"] for line in lines) > 0
        assert sum(line["rollout/tokens_read_again"] for line in lines) > 0
    for line in lines:
        shares = {key: value for key, value in line.items() if key.startswith("data/lag_")}
        assert sum(shares.values()) == pytest.approx(1)
        assert max(int(key.split("_")[1]) for key in shares) <= whole.rollout.max_staleness
    text = (whole.run.directory / "metrics.jsonl").read_text()
    assert '"time/trainer_wait_s":' in text and '"time/samplers_wait_s":' in text
    busy = [line["rollout/busy_frac"] for line in lines if line["rollout/rounds"]]
    assert 0 <= min(busy) <= max(busy) <= 1 and max(busy) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_lag_it_is_the_sequential_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = config(tmp_path, "plain", kind, ahead=0, steps=4)
    ours = config(tmp_path, "ours", kind, ahead=0, steps=4)
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
def test_a_run_killed_while_requests_are_in_flight_equals_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    whole = config(tmp_path, "whole", "dapo", ahead=2, steps=10)
    killed = config(tmp_path, "killed", "dapo", ahead=2, steps=10)
    uninterrupted(whole, run_continuously)
    killed_until_done(killed, kills=3, seed=5, body=run_continuously)
    check_same(killed.run.directory, whole.run.directory)
