"""Rollouts that go on while a batch trains: their source, and what is noted and said of rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from oxrl.assembly.settle import ROUNDS
from oxrl.config import Config
from oxrl.engines.sample.parked import ParkingEngine
from oxrl.errors import counted
from oxrl.rollouts.continuous import ContinuousRollouts, Pace
from oxrl.rollouts.free import FreeRollouts
from oxrl.rollouts.schedule import SCHEDULE
from oxrl.rollouts.sync import RolloutParts, RolloutSource
from oxrl.runs.pins import Choice, note_choice
from oxrl.tables.engines import KEPT_CACHES


def sample_ahead(cfg: Config, parts: RolloutParts, say: Callable[[str], object]) -> RolloutSource:
    """Build the source of a run with `rollout.max_staleness`, and say what is to be expected of it.

    Args:
        cfg: of the run.
        parts: of its sources.
        say: tells the user something.
    """
    # A process that shares a GPU with this one takes turns with it.
    background = cfg.inference_engine.actors > 0 or cfg.inference_engine.processes > 0
    sampler = cast(ParkingEngine, parts.sampler)
    parts = replace(parts, slots=cfg.inference_engine.max_rows * max(1, cfg.samplers))
    ahead = cfg.ahead
    updates = cfg.train.updates
    rollout_steps = cfg.run.steps // updates
    rounds = cfg.rollout.rounds
    say(who_waits(cfg, background=background))
    if cfg.rollout.schedule == "free":
        return FreeRollouts(
            parts,
            sampler,
            ahead=ahead,
            updates=updates,
            rollout_steps=rollout_steps,
            background=background,
            path=cfg.run.directory / SCHEDULE,
        )

    def note(found: int) -> None:
        note_choice(cfg.run.directory, ROUNDS, Choice(found, "measured over the first two batches"))
        say(f"rollout.rounds: {found} (auto, noted); to repeat this run set rollout.rounds={found}")

    return ContinuousRollouts(
        parts,
        sampler,
        ahead=ahead,
        rounds=Pace(note) if rounds == "auto" else rounds,
        updates=updates,
        rollout_steps=rollout_steps,
        background=background,
    )


def who_waits(cfg: Config, *, background: bool) -> str:
    """Say how old samples may be, for how long a batch trains, and who waits for whom.

    Args:
        cfg: of the run.
        background: samplers work while a batch trains.
    """
    lag = f"tokens lag at most {counted(cfg.rollout.max_staleness, 'weight version')}"
    waits = "; whoever is done first waits for the other"
    rounds = cfg.rollout.rounds
    trains = "a batch trains for as many decode rounds as the first two batches show"
    if rounds != "auto":
        trains = f"a batch trains for {counted(rounds, 'decode round')}"
    if cfg.rollout.schedule == "free":
        trains = "the clock decides what is sampled by which weights, see schedule.jsonl"
        waits = ""
    if not background:
        waits = "; one process samples, then trains: nothing overlaps"
    kept = f"; {KEPT_CACHES}" if cfg.rollout.swap == "keep" else ""
    return f"rollouts: {lag}; {trains}{waits}{kept}"
