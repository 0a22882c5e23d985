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
        yield at("rollout.temperature", rule, "train.advantage")
    if rollout.top_p < 1:
        yield at("rollout.top_p", f"training needs 1: {cut}")
    if rollout.top_k > 0:
        yield at("rollout.top_k", f"training needs 0: {cut}")
