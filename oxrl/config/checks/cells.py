"""Cells and corrections that fit together."""

from __future__ import annotations

from oxrl.config.checks.base import Problems, at
from oxrl.config.reads import row_fields
from oxrl.config.schema import Config
from oxrl.config.sections.train import CELLS
from oxrl.config.source import Problem
from oxrl.tables.numbers import CORRECTION_MAX, CORRECTION_MIN, PASS_K, WEIGHT_MAX, WEIGHT_MIN

# Corrections that are ratios themselves; the others keep a token or drop it.
WEIGHTING = ("truncate", "mask")


def check_correction(cfg: Config) -> Problems:
    """Old logprobs, correction and denominator: the sampler's mismatch is corrected once."""
    row = cfg.train.row
    also = ("train.correction", "train.denominator")
    if row.correction == "none":
        return
    if cfg.train.old_logprobs == "bypass":
        yield at(
            "train.old_logprobs",
            (
                "puts the sampler's logprobs into the ratio, "
                f"and correction {row.correction} would count them twice; "
                "set train.correction: none or recompute"
            ),
            *also,
        )
    if row.denominator == "rollout" and row.correction in WEIGHTING:
        yield at(
            "train.correction",
            (
                f"a ratio against the rollout policy and correction {row.correction} "
                "count the mismatch twice; set train.correction: none or train.denominator: old"
            ),
            *also,
        )


def check_cells(cfg: Config) -> Problems:
    """Cells and numbers that do not fit together."""
    row = cfg.train.row
    if row.unsupported:
        yield at("train.alg_name", row.unsupported, *(f"train.{name}" for name in CELLS))
    if row.gate == "policy_gradient":
        rule = f"has no effect: {row.gate} reads no importance ratio; remove it, or set train.loss"
        if cfg.train.ratio not in (None, "none"):
            yield at("train.ratio", rule, "train.loss")
        if cfg.train.denominator is not None:
            yield at("train.denominator", rule, "train.loss")
    elif row.ratio == "none":
        yield Problem(
            "train.ratio",
            (
                f"{row.gate} needs an importance ratio: "
                "set train.ratio, or train.loss: policy_gradient"
            ),
            row.ratio,
            also=("train.loss",),
        )
    samples = cfg.rollout.n_samples
    if row.advantage == "pass_at_k" and cfg.train.value(PASS_K) > samples:
        yield at(
            "train.pass_k",
            f"cannot exceed rollout.n_samples {samples}: lower it, or sample more",
            "rollout.n_samples",
        )
    read = row_fields(row)
    for low, high in ((WEIGHT_MIN, WEIGHT_MAX), (CORRECTION_MIN, CORRECTION_MAX)):
        path = f"train.{low.key}"
        above = f"train.{high.key}"
        upper = cfg.train.value(high)
        if path in read and above in read and cfg.train.value(low) >= upper:
            yield at(path, f"must be below {above}={upper}", above)
