"""Rollouts that go on while a batch trains: their source, and what is noted and said of rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from oxrl.assembly.settle import ROUNDS
from oxrl.config import Config
from oxrl.engines.sample.parked import ParkingEngine
from oxrl.errors import counted
from oxrl.rollouts.continuous import ContinuousRollouts
from oxrl.rollouts.sync import RolloutParts, RolloutSource
from oxrl.runs.pins import Choice, note_choice


def sample_ahead(cfg: Config, parts: RolloutParts, say: Callable[[str], object]) -> RolloutSource:
    """Build the source of a run with `rollout.max_staleness`, and say what is to be expected of it.

    Args:
        cfg: of the run.
        parts: of its sources.
        say: tells the user something.
    """
    rounds = cfg.rollout.rounds
    background = cfg.inference_engine.actors > 0 or cfg.inference_engine.processes > 0

    def note(found: int) -> None:
        note_choice(cfg.run.directory, ROUNDS, Choice(found, "measured over the first two batches"))
        say(f"rollout.rounds: {found} (auto, noted); to repeat this run set rollout.rounds={found}")

    say(who_waits(cfg, background=background))
    return ContinuousRollouts(
        parts,
        cast(ParkingEngine, parts.sampler),
        ahead=cfg.ahead,
        rounds=None if rounds == "auto" else rounds,
        updates=cfg.train.updates,
        rollout_steps=cfg.run.steps // cfg.train.updates,
        # A process that shares a GPU with this one takes turns with it.
        background=background,
        on_rounds=note,
        slots=cfg.inference_engine.max_rows * max(1, cfg.samplers),
    )


def who_waits(cfg: Config, *, background: bool) -> str:
    """Say how old samples may be, for how many rounds a batch trains, and who waits for whom.

    Args:
        cfg: of the run.
        background: samplers work while a batch trains.
    """
    rounds = cfg.rollout.rounds
    measured = "as many decode rounds as the first two batches show"
    trains = measured if rounds == "auto" else counted(rounds, "decode round")
    waits = "whoever is done first waits for the other"
    if not background:
        waits = "one process samples, then trains: nothing overlaps"
    lag = counted(cfg.rollout.max_staleness, "weight version")
    return f"rollouts: tokens lag at most {lag}; a batch trains for {trains}; {waits}"
