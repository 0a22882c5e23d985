"""Runs in processes that are killed at any moment, and gone on with."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from oxrl.config import Config
from support.command_line import forked

DEADLINE_S = 120.0


def run_in_child(cfg: Config) -> None:
    """Body of the forked process that is going to be killed."""
    from oxrl.commands.train import run

    os.setpgid(0, 0)
    run(cfg, resume=True)


def start_run(
    cfg: Config, body: Callable[..., None] = run_in_child, *further: object
) -> multiprocessing.process.BaseProcess:
    # The fork server has everything imported, so that a killed run costs a second and not ten.
    process = forked(body, cfg, *further)
    process.start()
    return process


def run_to_the_end(cfg: Config, body: Callable[..., None], ended: Path) -> None:
    """Body of a process that is killed for certain: at its last step it waits for that."""
    from oxrl.recipes.session import Session

    def wait(self: Session, step: int) -> None:
        ended.touch()
        time.sleep(DEADLINE_S)

    Session.finish = wait
    body(cfg)


def kill_when(
    process: multiprocessing.process.BaseProcess,
    run: Path,
    moment: str,
    chance: random.Random,
    ended: Path | None = None,
) -> str:
    """Wait for `moment` of the run, then SIGKILL it. Says what it hit, or "finished" when the run
    was faster. ended: a file that is there where a run is faster and waits.
    """
    metrics, checkpoints = run / "metrics.jsonl", run / "checkpoints"
    lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    wanted = lines + chance.randint(1, 2)
    # What an earlier kill left is removed when a run starts, and no checkpoint of this one.
    left = _half_written(checkpoints)
    deadline = time.monotonic() + DEADLINE_S
    while process.is_alive():
        assert time.monotonic() < deadline, f"the run did not reach {moment} in {DEADLINE_S} s"
        if ended is not None and ended.exists():
            moment = "end"
            break
        if moment == "checkpoint":
            found = _half_written(checkpoints)
            left &= found
            if found - left:
                if metrics.exists() and metrics.stat().st_size:
                    time.sleep(chance.uniform(0, 0.02))
                    break
        elif metrics.exists() and metrics.read_bytes().count(b"\n") >= wanted:
            line = json.loads(metrics.read_bytes().split(b"\n")[wanted - 1])
            step_s = line["time/step_s"] - line.get("time/setup_s", 0.0)
            time.sleep(chance.uniform(0, step_s))  # somewhere in the next rollout, reward or update
            break
        time.sleep(0.001)
    if not process.is_alive():
        return "finished"
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(DEADLINE_S)
    return moment


def _half_written(checkpoints: Path) -> set[str]:
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    return {name for name in names if name.startswith(".tmp")}


def uninterrupted(cfg: Config, body: Callable[..., None] = run_in_child) -> None:
    process = start_run(cfg, body)
    process.join(DEADLINE_S)
    assert process.exitcode == 0


def killed_until_done(
    cfg: Config, *, kills: int, seed: int, body: Callable[..., None] = run_in_child
) -> list[str]:
    """Kill the run `kills` times at random moments, resuming in between, then let it finish.

    Returns:
        As many moments: "end" where the run was faster than who kills it.
    """
    chance = random.Random(seed)
    hits: list[str] = []
    ended = cfg.run.directory.with_suffix(".ended")
    for _ in range(kills):
        ended.unlink(missing_ok=True)
        moment = chance.choice(["checkpoint", "anywhere", "anywhere"])
        process = start_run(cfg, run_to_the_end, body, ended)
        hits.append(kill_when(process, cfg.run.directory, moment, chance, ended))
        assert process.exitcode == -signal.SIGKILL
    uninterrupted(cfg, body)
    return hits
