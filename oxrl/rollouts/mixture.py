"""The metrics of each dataset of a mixture."""

from __future__ import annotations

from math import nan

from oxrl.types import Metrics, Rollouts


def rewards_by_source(rollouts: Rollouts) -> Metrics:
    """`reward/mean/<source>` of every source, NaN of one without a score; none of a single one."""
    sources = sorted({rollout.prompt.source for rollout in rollouts if rollout.prompt.source})
    metrics: Metrics = {}
    if len(sources) < 2:
        return metrics
    for source in sources:
        scores = [rollout.score.value for rollout in rollouts if rollout.prompt.source == source]
        values = [value for value in scores if value is not None]
        metrics[f"reward/mean/{source}"] = sum(values) / len(values) if values else nan
    return metrics
