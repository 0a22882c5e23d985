"""Columns that have other names in the data."""

from __future__ import annotations

from oxrl.config.checks.base import Problems
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.errors import did_you_mean
from oxrl.tables.columns import READ


def check_columns(cfg: Config) -> Problems:
    """Columns are named that rows of this recipe have; those of prompts may have any."""
    columns = READ.get(cfg.recipe)
    if columns is None:
        return
    for ours, theirs in cfg.data.columns.items():
        if ours not in columns:
            near = did_you_mean(ours, columns)
            told = f"is no column that {cfg.train.alg_name} reads; there are {', '.join(columns)}"
            yield Problem(f"data.columns.{ours}", f"{told}{near}", theirs)
