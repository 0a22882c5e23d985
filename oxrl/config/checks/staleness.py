"""Samples that are drawn ahead of the update."""

from __future__ import annotations

from oxrl.config.checks.base import Problems, at
from oxrl.config.schema import Config


def check_staleness(cfg: Config) -> Problems:
    """What sampling ahead of the update takes."""
    path = "rollout.max_staleness"
    least = cfg.train.updates
    if cfg.rollout.max_staleness < least:
        yield at(
            path,
            (
                "a batch sampled while another trains lags "
                f"train.epochs x train.minibatches = {least} versions: "
                f"set it to {least} or more, or to 0"
            ),
            "train.epochs",
            "train.minibatches",
        )
    if cfg.rollout.force_strict_on_policy:
        yield at(
            "rollout.force_strict_on_policy",
            f"refuses every sample of earlier weights, which {path} asks for: set it to false",
            path,
        )
    if cfg.inference_engine.placement == "colocated":
        yield at(
            "inference_engine.placement",
            "takes turns on one device, and cannot sample while training: set it to separate",
            path,
        )
