"""Samples that training can learn from."""

from __future__ import annotations

from oxrl.config.checks.base import Problems, at
from oxrl.config.schema import Config


def check_sampling(cfg: Config) -> Problems:
    """Sampling that training can learn from."""
    rollout = cfg.rollout
    cut = "a cut distribution is not the policy that is trained; `oxrl eval` may cut"
    if rollout.temperature == 0:
        rule = "training cannot sample greedily"
        if cfg.train.row.compares_samples:
            rule += ": all samples of a prompt are identical and every advantage is 0"
        rule += "; set it above 0 (rollout.eval_temperature may be 0)"
        yield at(cfg, "rollout.temperature", rule, "train.advantage")
    if rollout.top_p < 1:
        yield at(cfg, "rollout.top_p", f"training needs 1: {cut}")
    if rollout.top_k > 0:
        yield at(cfg, "rollout.top_k", f"training needs 0: {cut}")


def check_staleness(cfg: Config) -> Problems:
    """What sampling ahead of the update takes."""
    path = "rollout.max_staleness"
    least = cfg.train.updates
    if cfg.rollout.max_staleness == 0:
        return
    if cfg.rollout.max_staleness < least:
        yield at(
            cfg,
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
            cfg,
            "rollout.force_strict_on_policy",
            f"refuses every sample of earlier weights, which {path} asks for: set it to false",
            path,
        )
    if cfg.inference_engine.placement == "colocated":
        yield at(
            cfg,
            "inference_engine.placement",
            "takes turns on one device, and cannot sample while training: set it to separate",
            path,
        )


def check_rejection(cfg: Config) -> Problems:
    """Sampling of which something different can be kept."""
    if cfg.rollout.temperature == 0 and cfg.rollout.n_samples > 1:
        yield at(
            cfg,
            "rollout.temperature",
            "all samples of a prompt are identical; set it above 0, or rollout.n_samples to 1",
            "rollout.n_samples",
        )
    if not isinstance(cfg.data.train, str):
        yield at(cfg, "data.train", "rft asks every prompt of one file; give a path without shares")
