"""Checkpoints that are written while training goes on, on disks that are slow, hang, or lose power."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from oxrl.checkpoint import shares
from oxrl.checkpoint.verify import latest_checkpoint, verify_checkpoint
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import CheckpointWriteError
from oxrl.recipes import supervised
from support.killed_runs import kill_when, start_run, uninterrupted
from support.small_runs import final_files, metric_lines, sft_config

WEIGHTS = 24  # of the model
ASYNC = ["run.async_checkpoints=true", "run.checkpoint_every=1"]


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """On disk: these tests are about what is left there."""
    return disk_path


def lines(cfg: Config) -> int:
    file = cfg.run.directory / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def slowly(seconds: float, seen: list[int], cfg: Config, *, most: int = 10**9) -> Any:
    """A disk that takes its time for `most` tensors, and notes how many steps were done before."""

    def put(descriptor: int, data: memoryview, offset: int) -> int:
        time.sleep(seconds if len(seen) < most else 0)
        seen.append(lines(cfg))
        return os.pwrite(descriptor, data, offset)

    return put


def test_training_goes_on_while_a_slow_disk_writes_and_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = sft_config(tmp_path, "waiting")
    run(waiting)
    meanwhile = sft_config(tmp_path, "meanwhile", [*ASYNC, "run.deadline_s=3"])
    seen: list[int] = []
    with monkeypatch.context() as disk:
        disk.setattr(shares, "put", slowly(0.05, seen, meanwhile, most=4 * WEIGHTS))
        began = time.monotonic()
        run(meanwhile)
    # The second alone, of weights and twice as many moments, took longer than the deadline.
    assert time.monotonic() - began > 4 * WEIGHTS * 0.05
    assert seen[:WEIGHTS] == [0] * WEIGHTS  # the first is waited for
    second = seen[WEIGHTS : 4 * WEIGHTS]
    assert second[0] >= 1 and second[-1] > 1  # the next step was done while it was written
    assert metric_lines(meanwhile.run.directory) == metric_lines(waiting.run.directory)
    assert final_files(meanwhile.run.directory) == final_files(waiting.run.directory)


def test_a_checkpoint_is_whole_beside_which_the_best_weights_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = {"steps": 2, "eval_every": 1, "keep_best": True}
    data = {"eval": str(tmp_path / "chats.jsonl")}
    cfg = sft_config(tmp_path, "meanwhile", ASYNC, run=evaluated, data=data)
    kept: list[int] = []
    losses = iter([2.0, 1.0])

    def put(descriptor: int, data: memoryview, offset: int) -> int:
        """A slow disk, but for the best weights."""
        if "best" in os.readlink(f"/proc/self/fd/{descriptor}"):
            kept.append(lines(cfg))
        elif lines(cfg):
            time.sleep(0.002)
        return os.pwrite(descriptor, data, offset)

    with monkeypatch.context() as disk:
        disk.setattr(shares, "put", put)
        disk.setattr(supervised, "evaluate_loss", lambda *_, **__: {"eval/loss": next(losses)})
        run(cfg)
    assert set(kept) == {0, 1}
    for step in (1, 2):
        saved = cfg.run.directory / "checkpoints" / f"step_{step:08d}"
        assert verify_checkpoint(saved) == []


def test_a_disk_that_hangs_is_told_from_a_slow_one_and_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = sft_config(tmp_path, "hangs", ["run.steps=2"])
    run(cfg)
    more = sft_config(tmp_path, "hangs", ["run.steps=3", "run.deadlines={checkpoint: 0.5}"])
    with monkeypatch.context() as disk:
        disk.setattr(shares, "put", slowly(3, [], more))
        with pytest.raises(
            CheckpointWriteError, match=r"was written for run\.deadlines\.checkpoint=0\.5 s"
        ):
            run(more, resume=True)
    newest = latest_checkpoint(cfg.run.directory / "checkpoints")
    assert newest is not None and newest.step == 2
    run(more, resume=True)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = sft_config(tmp_path, "full", [*ASYNC, "run.steps=3"])

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if lines(cfg):
            raise OSError(28, "No space left on device")
        return os.pwrite(descriptor, data, offset)

    with monkeypatch.context() as disk:
        disk.setattr(shares, "put", full)
        with pytest.raises(CheckpointWriteError, match="No space left"):
            run(cfg)
    assert "no checkpoint at step 1, trying again at the next" in caplog.text
    [left] = (cfg.run.directory / "checkpoints").iterdir()
    assert left.name == "step_00000000"
    run(cfg, resume=True)
    assert metric_lines(cfg.run.directory)[-1]["step"] == 3


def run_on_a_slow_disk(cfg: Config) -> None:
    """Body of the process that is going to be killed."""
    os.setpgid(0, 0)
    shares.put = slowly(0.001, [], cfg)
    run(cfg, resume=True)


def test_a_run_killed_while_it_writes_beside_training_equals_one_that_was_not(
    tmp_path: Path,
) -> None:
    whole = sft_config(tmp_path, "whole", ["run.steps=16"])
    killed = sft_config(tmp_path, "killed", [*ASYNC, "run.steps=16"])
    run(whole)
    chance = random.Random(1)
    hits = 0
    while hits < 4:
        process = start_run(killed, run_on_a_slow_disk)
        moment = chance.choice(["checkpoint", "anywhere"])
        if kill_when(process, killed.run.directory, moment, chance) == "finished":
            break
        hits += 1
        newest = latest_checkpoint(killed.run.directory / "checkpoints")
        assert newest is None or newest.step <= lines(killed)
    assert hits >= 3
    uninterrupted(killed)
    left, right = killed.run.directory, whole.run.directory
    assert metric_lines(left) == metric_lines(right)
    assert final_files(left) == final_files(right)
