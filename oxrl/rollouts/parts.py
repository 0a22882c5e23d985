"""The metrics of a reward's parts and of each dataset of a mixture: most runs have neither."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from statistics import fmean, stdev

import torch

from oxrl.functional.shaping import informative_groups
from oxrl.types import Metrics, Rollouts, Score, ScoreStatus

# What becomes of a part that is not in the score, but for the last because it failed there.
FAILURES: tuple[ScoreStatus, ...] = ("timeout", "error", "invalid", "left_out")


def metrics_of_parts(rollouts: Rollouts, compared: Sequence[str]) -> Metrics:
    """Compute the metrics of the parts of a step's rewards.

    Args:
        compared: parts that advantages compare one by one; empty: they compare the sums.

    Returns:
        Those of `part_metrics`, and of every part of the config `reward/part/<name>/uneven_groups`:
        in how many groups it counts for some responses and, having failed, for others not.
    """
    metrics = part_metrics([rollout.score for rollout in rollouts])
    scored = [rollout for rollout in rollouts if rollout.score.value is not None]
    for name in {name for rollout in scored for name in rollout.score.statuses}:
        counts = {r.group_id for r in scored if r.score.statuses.get(name) == "ok"}
        lacks = {r.group_id for r in scored if r.score.statuses.get(name) != "ok"}
        metrics[f"reward/part/{name}/uneven_groups"] = float(len(counts & lacks))
    if compared and scored:
        # Equal sums of parts that differ teach something.
        metrics["reward/zero_variance_groups"] = alike_groups(rollouts, compared)
    return metrics


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
        metrics[part] = fmean(found) if found else nan
        metrics[f"{part}/std"] = stdev(found) if len(found) > 1 else 0.0
        metrics[f"{part}/count"] = float(len(found))
        for status in FAILURES if name in statuses else ():
            metrics[f"{part}/{status}"] = float(statuses[name].count(status))
    return metrics


def groups_of_different_parts(rollouts: Rollouts, names: Sequence[str]) -> list[int]:
    """Groups, in draw order, in which a part of the reward differs between scored responses.

    Args:
        names: of the parts that count.
    """
    scored = [rollout for rollout in rollouts if rollout.score.value is not None]
    ids = torch.tensor([rollout.group_id for rollout in scored], dtype=torch.int64)
    found: set[int] = set()
    for name in names:
        counted = [rollout.score.counted(name) for rollout in scored]
        values = torch.tensor(counted, dtype=torch.float64)
        known = ids[~values.isnan()]
        differ = informative_groups(values[~values.isnan()], known)
        found |= set(known[differ].tolist())
    return sorted(found)


def alike_groups(rollouts: Rollouts, names: Sequence[str]) -> float:
    """The share of groups in which no part of these names differs."""
    groups = {rollout.group_id for rollout in rollouts if rollout.score.value is not None}
    return 1 - len(groups_of_different_parts(rollouts, names)) / max(len(groups), 1)


def rewards_by_source(rollouts: Rollouts) -> Metrics:
    """`reward/mean/<source>` of every source, NaN of one without a score; none of a single one, and
    none without a reward.
    """
    rollouts = [rollout for rollout in rollouts if rollout.score.status != "none"]
    sources = sorted({rollout.prompt.source for rollout in rollouts if rollout.prompt.source})
    metrics: Metrics = {}
    if len(sources) < 2:
        return metrics
    for source in sources:
        scores = [rollout.score.value for rollout in rollouts if rollout.prompt.source == source]
        values = [value for value in scores if value is not None]
        metrics[f"reward/mean/{source}"] = sum(values) / len(values) if values else nan
    return metrics
