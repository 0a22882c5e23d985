"""Numbers and sums of preference losses."""

from __future__ import annotations

from oxrl.config.checks.base import Problems, at
from oxrl.config.schema import Config
from oxrl.errors import did_you_mean
from oxrl.tables.numbers import ALPHA, LABEL_NOISE
from oxrl.tables.preference import METHODS


def check_preference(cfg: Config) -> Problems:
    """Numbers at which a formula has no value, and sums of losses that read different things."""
    algorithm = cfg.train.alg_name
    addable = [name for name, method in METHODS.items() if method.addable]
    for name in cfg.train.mix:
        if name in addable:
            if why := _why_not_added(name, algorithm):
                yield at(
                    "train.mix",
                    f"{name} {why}, and cannot be added to {algorithm}",
                    "train.alg_name",
                )
        else:
            why = "is no preference loss"
            if name in METHODS:
                why = "takes more than a pair, or is a sum itself"
            yield at("train.mix", f"{name} {why}{did_you_mean(name, addable)}")
    if algorithm == "exo" and cfg.train.value(LABEL_NOISE) == 0:
        yield at("train.label_noise", "exo takes its logarithm: set it above 0; 0.001 is usual")
    if algorithm == "f_dpo_alpha" and cfg.train.value(ALPHA) == 1:
        yield at("train.preference_alpha", "at 1 the alpha divergence is the reverse KL: use dpo")


def _why_not_added(name: str, algorithm: str) -> str:
    """Say why the addable loss `name` cannot be added to `algorithm`; empty where it can."""
    method = METHODS[algorithm]
    if method.unpaired:
        return "is a loss of pairs"
    if name == algorithm or name in method.parts:
        return "is in it already"
    if METHODS[name].reference and not method.reference:
        return "needs a reference"
    return ""
