"""Runs that learn from answers: evaluations that generate some, and those that are kept."""

from __future__ import annotations

from oxrl.config.checks.base import Problems, at
from oxrl.config.checks.model import check_context
from oxrl.config.checks.reward import check_reward
from oxrl.config.schema import Config


def check_generated(cfg: Config) -> Problems:
    """Answers can be generated and scored."""
    yield from check_reward(cfg)
    yield from check_context(cfg)
    if cfg.train.engine.several_ranks:
        rule = "evaluations generate answers in one process: set train.backend to local"
        yield at("reward.name", rule, "train.backend")


def check_rejection(cfg: Config) -> Problems:
    """Sampling of which something different can be kept."""
    if cfg.rollout.temperature == 0 and cfg.rollout.n_samples > 1:
        yield at(
            "rollout.temperature",
            "all samples of a prompt are identical; set it above 0, or rollout.n_samples to 1",
            "rollout.n_samples",
        )
    if not isinstance(cfg.data.train, str):
        yield at("data.train", "rft asks every prompt of one file; give a path without shares")
