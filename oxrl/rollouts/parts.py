"""What the parts of a reward say, in the record of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from oxrl.types import Metrics, Score, ScoreStatus

# What becomes of a part without a score.
FAILURES: tuple[ScoreStatus, ...] = ("timeout", "error", "invalid")


def part_metrics(scores: Sequence[Score]) -> Metrics:
    """Mean and spread of what the scores are made of, by the names that the reward gives.

    Args:
        scores: of a step; those without a part of a name say nothing of it.

    Returns:
        `reward/part/<name>` and `reward/part/<name>/std` (unbiased; 0 of one value, NaN of none),
        how many scores have it, and of a reward that is asked for in parts how many of each failed,
        by status; nothing for rewards without parts.
    """
    values: dict[str, list[float]] = {}
    statuses: dict[str, list[str]] = {}
    for score in scores:
        for name, status in score.statuses.items():
            values.setdefault(name, [])
            statuses.setdefault(name, []).append(status)
        for name, value in score.parts.items():
            values.setdefault(name, []).append(value)
    metrics: Metrics = {}
    for name in sorted(values):
        found = values[name]
        part = f"reward/part/{name}"
        metrics[part] = statistics.fmean(found) if found else math.nan
        metrics[f"{part}/std"] = statistics.stdev(found) if len(found) > 1 else 0.0
        metrics[f"{part}/count"] = float(len(found))
        for status in FAILURES if name in statuses else ():
            metrics[f"{part}/{status}"] = float(statuses[name].count(status))
    return metrics


def part_fields(score: Score) -> dict[str, object]:
    """What a line of samples.jsonl says of the parts of a score."""
    fields: dict[str, object] = {"parts": dict(score.parts)}
    if score.statuses:
        fields["part_statuses"] = dict(score.statuses)
    return fields
