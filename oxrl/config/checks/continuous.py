"""Sampling that goes on while a batch trains: what it takes, and what does not go with it."""

from __future__ import annotations

from oxrl.config.schema import Config
from oxrl.config.source import Problems, at

FIELD = "rollout.max_staleness"


def continuous_problems(cfg: Config) -> Problems:
    """Every problem of a run whose `rollout.max_staleness` is above 0."""
    yield from _bound(cfg)
    if cfg.rollout.force_strict_on_policy:
        yield at(
            "rollout.force_strict_on_policy",
            f"refuses every sample of earlier weights, which {FIELD} asks for: set it to false",
            FIELD,
        )
    if cfg.inference_engine.placement == "colocated":
        yield at(
            "inference_engine.placement",
            "takes turns on one device, and cannot sample while training: set it to separate",
            FIELD,
        )
    yield from _swap(cfg)
    if cfg.rollout.schedule == "logical":
        yield from _clocks(cfg)


def _bound(cfg: Config) -> Problems:
    """Whole batches of versions."""
    updates = cfg.train.updates
    bound = cfg.rollout.max_staleness
    rest = bound % updates
    if not rest:
        return
    yield at(
        FIELD,
        (
            "counts weight versions, of which a rollout batch makes train.epochs x "
            f"train.minibatches = {updates}: set it to {bound - rest} or {bound - rest + updates}"
        ),
        "train.epochs",
        "train.minibatches",
    )


def _swap(cfg: Config) -> Problems:
    """Caches that outlive their weights, where they may."""
    if cfg.rollout.swap == "recompute":
        return
    if cfg.inference_engine.name != "vllm":
        yield at(
            "rollout.swap",
            "keep is for inference_engine.name vllm alone, no proof of it exists: set it to "
            "recompute",
            "inference_engine.name",
        )
    if cfg.rollout.schedule == "logical":
        yield at(
            "rollout.swap",
            "keep is for rollout.schedule free alone, and no proof of it exists: set it to "
            "recompute",
            "rollout.schedule",
        )


def _clocks(cfg: Config) -> Problems:
    """Nothing may read the clock, by which no run repeats."""
    environment = cfg.environment
    repeats = "what is sampled then depends on the clock, and rollout.schedule logical repeats"
    if environment.overlap:
        yield at(
            "environment.overlap",
            f"{repeats}: set it to false, or the schedule to free",
            "rollout.schedule",
        )
    if environment.max_seconds is not None:
        yield at(
            "environment.max_seconds",
            f"{repeats}: set it to null, or the schedule to free",
            "rollout.schedule",
        )
