"""Whole runs whose sampler goes on while a batch trains: the source is put in by a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from oxrl.assembly import assemble, episode_wiring
from oxrl.assembly.assembly import Assembly
from oxrl.config import Config
from oxrl.engines.sample.parked import ParkingEngine
from oxrl.rollouts.continuous import ContinuousRollouts
from oxrl.rollouts.parked_episodes import ParkedEpisodes
from oxrl.rollouts.sync import RolloutParts, RolloutSource
from support.killed_runs import run_in_child

# Decode rounds for which a batch trains.
ROUNDS = 4


def continuous_source(assembly: Assembly, parts: RolloutParts) -> RolloutSource:
    """Build the source in place of the one that `rollout.max_staleness` stands for."""
    cfg = assembly.cfg
    source = ContinuousRollouts(
        parts,
        cast(ParkingEngine, parts.sampler),
        ahead=cfg.rollout.max_staleness // cfg.train.updates,
        rounds=ROUNDS,
        updates=cfg.train.updates,
        rollout_steps=cfg.run.steps // cfg.train.updates,
        background=False,
    )
    source.slots = cfg.inference_engine.max_rows
    return source


def use(patch: Callable[[object, str, object], None] | pytest.MonkeyPatch) -> None:
    """Have every run of this process sample so."""
    put = patch.setattr if isinstance(patch, pytest.MonkeyPatch) else patch
    put(assemble, "build_source", continuous_source)
    put(episode_wiring, "EpisodeEngine", ParkedEpisodes)


def run_continuously(cfg: Config) -> None:
    """Body of a forked process that is going to be killed."""
    use(setattr)
    run_in_child(cfg)
