"""Scored samples become rows that can be learned from; all of them are counted and recorded."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.data.batching import checked_rollout_batch
from oxrl.data.samples import repetition_metrics
from oxrl.errors import InvariantError
from oxrl.functional.metrics import reward_metrics
from oxrl.rollouts.sync import RolloutStep
from oxrl.tables.columns import KEPT, NOTHING_MORE, Columns
from oxrl.types import Images, Metrics, RolloutBatch, Rollouts, TokenIds


class RowRules(NamedTuple):
    """The rules for rows: what every row has to satisfy, and which rows are left out.

    pad_id, stop_token_ids: of the tokenizer. max_tokens: longest response; None of episodes.
    strict: refuse tokens that were not sampled by the newest weights.
    max_staleness: weight versions that a token may lag behind.
    groups_of_two: advantages compare rows of a group, so a row left alone has nothing to learn.
    images: those of the prompts; None: they have none.
    columns: that are recorded of every token that is sampled.
    vocabulary: tokens that the policy can tell apart; None: not known.
    """

    pad_id: int
    stop_token_ids: TokenIds
    max_tokens: int | None
    strict: bool
    max_staleness: int
    groups_of_two: bool
    images: Images
    columns: Columns = NOTHING_MORE
    vocabulary: int | None = None


# Of rows, by what became of them.
Counts = dict[str, int]


class TrainableRows(NamedTuple):
    """The rows that are trained on, their places in `RolloutStep.rollouts`, and the others."""

    batch: RolloutBatch
    places: list[int]
    dropped: Counts


def trainable_rows(step: RolloutStep, rules: RowRules, *, version: int) -> TrainableRows:
    """Check every row, and leave out those that cannot be learned from, by reason.

    A row without a score is removed before any statistic or denominator sees it. Columns are in the
    batch then, and no longer in the samples of `step`: they may be larger than everything else.

    Args:
        step: what was sampled; loses its columns.
        rules: that every row has to satisfy.
        version: weight version of the update, for the age of tokens.

    Raises:
        InvariantError: a row is structurally broken, see `check_rollout_batch`, or too old, or a
            kept set is none.
    """
    batch = checked_rollout_batch(
        step.rollouts,
        pad_id=rules.pad_id,
        images=rules.images,
        stop_token_ids=rules.stop_token_ids,
        max_tokens=rules.max_tokens,
        strict_version=version if rules.strict else None,
        columns=rules.columns,
    )
    if KEPT in rules.columns:
        from oxrl.data.kept_sets import check_kept_sets  # most runs sample from all tokens

        step.sampler |= check_kept_sets(batch.inputs, rules.vocabulary, step.step)
    if rules.columns:
        for own in (step.rollouts, step.baselines):
            own[:] = [replace(rollout, completion=rollout.completion.bare) for rollout in own]
    keep = torch.ones(len(batch), dtype=torch.bool)
    dropped: Counts = {}

    def drop(reason: str, rows: Tensor) -> None:
        dropped[reason] = int((keep & rows).sum())
        keep.logical_and_(~rows)

    # No source hands such tokens over.
    age = (version - batch.versions).masked_fill(~batch.inputs.response_mask, 0)
    oldest = int(age.max())
    if oldest > rules.max_staleness:
        raise InvariantError(
            f"step {version} was given tokens that lag {oldest} weight versions behind it, and "
            f"rollout.max_staleness is {rules.max_staleness}"
        )
    drop("surplus", batch.group_ids >= step.next_draw)
    drop("uninformative", ~torch.isin(batch.group_ids, torch.tensor(step.groups)))
    drop("unscored", ~batch.valid)
    if step.baselines:
        dropped["baseline"] = len(step.baselines)
        baseline_rewards = rewards_of_groups(step.baselines, batch.group_ids)
        batch = replace(batch, greedy_rewards=baseline_rewards)
        drop("without_baseline", baseline_rewards.isnan())
    if rules.groups_of_two:
        same_group = batch.group_ids[:, None] == batch.group_ids[None, :]
        drop("alone", (same_group & keep[None, :]).sum(1) < 2)
    rows = keep.nonzero()[:, 0]
    return TrainableRows(batch=batch.select(rows), places=rows.tolist(), dropped=dropped)


def rewards_of_groups(baselines: Rollouts, group_ids: Tensor) -> Tensor:
    """[B] float64: the reward of the baseline of each row's group, NaN where it has none."""
    known = {b.group_id: b.score.value for b in baselines if b.score.value is not None}
    rewards = [known.get(group, nan) for group in group_ids.tolist()]
    return torch.tensor(rewards, dtype=torch.float64)


def scored_rewards(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(rewards float64, group ids int64) of the rollouts that have a score."""
    known = [rollout for rollout in rollouts if rollout.score.value is not None]
    rewards = [rollout.score.value for rollout in known]
    group_ids = [rollout.group_id for rollout in known]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids, dtype=torch.int64)


def sampling_metrics(step: RolloutStep) -> Metrics:
    """Describe what was sampled, whether or not it is trained on."""
    rollouts = step.rollouts
    metrics = reward_metrics(*scored_rewards(rollouts)) | repetition_metrics(rollouts)
    statuses = [rollout.score.status for rollout in rollouts]
    for status in ("timeout", "error", "invalid"):
        metrics[f"reward/{status}"] = float(statuses.count(status))
    fine = statuses.count("ok") + statuses.count("none")
    metrics["reward/failed_frac"] = 1 - fine / max(len(statuses), 1)
    parts = any(rollout.score.parts or rollout.score.statuses for rollout in rollouts)
    if parts or len({rollout.prompt.source for rollout in rollouts}) > 1:
        from oxrl.rollouts.parts import metrics_of_parts, rewards_by_source  # most have one of each

        metrics |= rewards_by_source(rollouts) | metrics_of_parts(rollouts, step.compared_parts)
    metrics["sampling/rounds"] = float(step.rounds)
    metrics["sampling/groups"] = float(len({rollout.group_id for rollout in rollouts}))
    return metrics


def sample_metrics(
    counts: Counts, step: RolloutStep, rows: TrainableRows, *, trained: int, in_flight: int
) -> Metrics:
    """Describe what was sampled, what the sampler counted, and what became of every sample.

    Args as of `count_samples`.
    """
    counted = count_samples(counts, step, rows, trained=trained, in_flight=in_flight)
    return sampling_metrics(step) | counted | step.sampler


def count_samples(
    counts: Counts, step: RolloutStep, rows: TrainableRows, *, trained: int, in_flight: int
) -> Metrics:
    """Every sample is accounted for: dispatched = trained + dropped for a reason + in flight.

    Args:
        counts: of the run so far, changed in place: dispatched, trained, dropped_<reason>.
        step: what was sampled.
        rows: what became of it.
        trained: samples of this step that are trained on.
        in_flight: samples that are not handed over yet.

    Returns:
        `samples/<name>` of every count and of what is in flight; `data/dropped_rows`, of this step.

    Raises:
        InvariantError: a sample was lost, or counted twice.
    """
    entries = {"dispatched": step.dispatched, "trained": trained}
    entries |= {f"dropped_{reason}": number for reason, number in rows.dropped.items()}
    for name, number in entries.items():
        counts[name] = counts.get(name, 0) + number
    everything = counts | {"in_flight": in_flight}
    accounted = sum(everything.values()) - counts["dispatched"]
    if accounted != counts["dispatched"]:
        raise InvariantError(
            f"{counts['dispatched']} samples were dispatched but {accounted} are accounted for: "
            f"{everything}"
        )
    metrics = {f"samples/{name}": float(value) for name, value in everything.items()}
    metrics["data/dropped_rows"] = float(sum(rows.dropped.values()))
    return metrics
