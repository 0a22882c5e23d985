"""Policy-gradient training, one loop for every row of the table.

Read `train` from top to bottom: every arrow of the data flow is one call there. Rows differ only in
the functions that `Objective` looks up by name and in their features. `step` counts optimizer steps
and is the weight version; `rollout_step` counts iterations; `draw` is the next position in the data
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from oxrl.data.batching import check_first_ratio
from oxrl.data.samples import sample_line
from oxrl.errors import required
from oxrl.functional.masks import masked_mean
from oxrl.functional.metrics import (
    mismatch_metrics,
    policy_metrics,
    row_metrics,
)
from oxrl.recipes.machine import Machine
from oxrl.recipes.objective import Objective, prepare_update, start_of_update
from oxrl.recipes.session import RolloutProgress, Session
from oxrl.recipes.step import gradients, named_tensors
from oxrl.rollouts.batch import TrainableRows, sample_metrics, trainable_rows
from oxrl.rollouts.sync import RolloutStep
from oxrl.seeds import stable_seed
from oxrl.types import Metrics, PolicyBatch, RolloutBatch


def train(machine: Machine, session: Session) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint on."""
    progress = session.restore(machine.saved, RolloutProgress(kl_coeff=machine.kl_coeff))
    if progress.line:  # a signal came while this step was evaluated
        finish_step(machine, session, progress, progress.step - machine.updates)
    while progress.step < machine.steps and not progress.good_enough:
        before = progress.step

        # The sampler gets the weights just trained and proves that it holds them; then it samples
        # a group of responses to every prompt, and the reward scores them.
        with session.saved_if_stopped(machine.saved, progress):
            sampled = machine.source.next(progress.draw, step=before)
            for feature in machine.features:
                feature.on_sampled(sampled.rollouts)

        # The rows that can be learned from; what every model says of them before the update.
        rows = trainable_rows(sampled, machine.row_rules, version=before)
        rollouts = rows.batch
        for feature in machine.features:
            rollouts = feature.on_rollouts(rollouts)
        seed = stable_seed("selection", machine.seed, progress.rollout_step)
        with session.clock.phase("time/logprobs_s"):
            batch = prepare_update(
                machine.objective,
                machine.models,
                rollouts,
                kl_coeff=progress.kl_coeff,
                seed=seed,
                version=before,
            )
        machine.ledger.count_before_update(sampled, rollouts, batch)
        record_samples(machine, session, sampled, rows, batch)

        # One optimizer step per minibatch; loss weights are normalised over each minibatch.
        parts = minibatches(machine, batch, rollout_step=progress.rollout_step)
        shared = batch_metrics(rows.batch, rollouts, batch, progress)
        for feature in machine.features:
            shared |= feature.steer(batch, progress)
        shared |= sampled.delivered | sample_metrics(
            progress.samples,
            sampled,
            rows,
            trained=len(torch.cat(parts).unique()),
            in_flight=machine.source.in_flight,
        )
        progress.rollout_step += 1
        progress.draw = sampled.next_draw
        for index, part in enumerate(parts):
            if progress.line:
                session.record_line(progress)
            step = before + index + 1
            with session.clock.phase("time/update_s"):
                metrics = update(machine, session, batch, part, step=step, first=index == 0)
            progress.step = step
            progress.line = shared | metrics
            progress.tokens = shared["data/tokens"] / len(parts)
        for feature in machine.features:
            feature.after_updates(before, progress.step)
        finish_step(machine, session, progress, before)
    session.finish(progress.step)


def finish_step(machine: Machine, session: Session, progress: RolloutProgress, before: int) -> None:
    """Evaluate where it is time for that, write the step's line, save where it is time."""
    found: Metrics = {}
    with session.saved_if_stopped(machine.saved, progress):
        if machine.evaluation is not None and session.eval_due(before, progress.step):
            found = machine.evaluation.measure(session, progress.step)
        for feature in machine.features:
            found |= feature.measure(before, progress.step)
    session.note_score(progress, found.get("eval/reward"))
    progress.line = progress.line | found
    session.record_line(progress)
    session.boundary(machine.saved, progress)


def record_samples(
    machine: Machine,
    session: Session,
    sampled: RolloutStep,
    rows: TrainableRows,
    batch: PolicyBatch,
) -> None:
    """Write every sample, with its advantage where it is trained on."""
    means = masked_mean(batch.advantages, batch.inputs.response_mask, dim=1).tolist()
    advantages = dict(zip(rows.places, means, strict=True))
    write_samples(session, sampled, advantages)
    if machine.keeps_tokens:
        session.recorder.record_rollouts(sampled.step, named_tensors(batch))


def write_samples(session: Session, sampled: RolloutStep, advantages: Mapping[int, float]) -> None:
    """Write the line of every sample of a step.

    Args:
        advantages: of those that are trained on, by their place among the rollouts.
    """
    lines = [
        sample_line(rollout, step=sampled.step, advantage=advantages.get(place))
        for place, rollout in enumerate((*sampled.rollouts, *sampled.baselines))
    ]
    session.recorder.record_samples(lines)


def minibatches(machine: Machine, batch: PolicyBatch, *, rollout_step: int) -> list[Tensor]:
    """Row indices of every optimizer step on a rollout batch: `epochs` passes of `minibatches`."""
    parts: list[Tensor] = []
    for epoch in range(machine.epochs):
        seed = stable_seed(machine.seed, rollout_step, epoch)
        parts += split_by_group(batch.group_ids, machine.minibatches, seed=seed)
    return parts


def split_by_group(group_ids: Tensor, count: int, *, seed: int) -> list[Tensor]:
    """Spread the rows of a batch over minibatches, groups kept whole.

    Args:
        group_ids: [B] int64.
        count: how many minibatches, as even as they go.
        seed: of the shuffle of the groups, where there is more than one minibatch.

    Returns:
        The rows of each minibatch, int64.
    """
    groups = group_ids.unique().numpy()
    if count > 1:
        groups = np.random.default_rng(stable_seed("minibatches", seed)).permutation(groups)
    return [
        torch.isin(group_ids, torch.from_numpy(part)).nonzero()[:, 0]
        for part in np.array_split(groups, count)
    ]


def update(
    machine: Machine, session: Session, batch: PolicyBatch, rows: Tensor, *, step: int, first: bool
) -> Metrics:
    """Optimizer step `step`, on `rows` of the rollout batch, of the policy and what else learns.

    A step with anything non-finite in it is refused on every engine and its batch is kept for
    inspection. A step with no trained token is not taken either: a zero gradient would still move
    Adam's momentum.
    """
    part = minibatch(machine.objective, batch, rows)
    if not part.inputs.response_mask.any():
        return refuse(machine) | {"data/empty_steps": 1.0}

    # Gradients of every engine first, then all of them step or none does.
    metrics = policy_gradients(machine, part, first=first)
    for feature in machine.features:
        added = None if metrics is None else feature.add_gradients(rows, part)
        metrics = None if metrics is None or added is None else metrics | added
    if metrics is None:
        session.dump(step, named_tensors(part))
        return refuse(machine) | {"data/empty_steps": 0.0}
    metrics |= machine.ledger.count_update(part)
    if any(feature.holds_policy(step) for feature in machine.features):
        stepped = machine.policy.skip_step() | {"update/skipped": 0.0}
    else:
        stepped = machine.policy.optim_step()
    refused = bool(stepped["update/skipped"])
    for feature in machine.features:
        stepped |= feature.optim_step(skip=refused)
    if stepped["update/skipped"]:
        session.dump(step, named_tensors(part))
    return metrics | stepped | {"data/empty_steps": 0.0}


def minibatch(objective: Objective, batch: PolicyBatch, rows: Tensor) -> PolicyBatch:
    """`rows` of a rollout batch, their loss weights normalised over themselves."""
    part = batch.select(rows)
    weights = objective.weights(part.inputs.response_mask, part.group_ids)
    part = replace(part, loss_weights=weights)
    for feature in objective.features:
        part = feature.on_minibatch(part)
    return part


def refuse(machine: Machine) -> Metrics:
    """Skip this step on every engine."""
    metrics = machine.policy.skip_step()
    for feature in machine.features:
        feature.optim_step(skip=True)
    return metrics


def policy_gradients(machine: Machine, batch: PolicyBatch, *, first: bool) -> Metrics | None:
    """Add the policy's gradient.

    Args:
        first: nothing has been learned from the rollout batch yet.

    Returns:
        Metrics over the whole minibatch; None when something is not finite.
    """
    objective = machine.objective
    found = gradients(machine.policy, batch, objective.policy_loss, objective.want)
    if not found.finite:
        return None
    logprobs = required(found.output.logprobs, "logprobs")
    mask = batch.inputs.response_mask
    old = start_of_update(logprobs, batch)
    if first and objective.old_logprobs == "recompute":
        check_first_ratio(logprobs, old, mask, machine.ratio_tolerance)
    about = policy_metrics(
        logprobs, old, mask, ref_logprobs=batch.ref_logprobs, entropy=found.output.entropy
    )
    mismatch = mismatch_metrics(
        old,
        batch.rollout_logprobs,
        mask,
        objective.corrected(logprobs, old, batch),
        correction_level=objective.correction_level,
    )
    return found.metrics | about | mismatch


def batch_metrics(
    rollouts: RolloutBatch, shaped: RolloutBatch, batch: PolicyBatch, progress: RolloutProgress
) -> Metrics:
    """Compute the metrics of the rows trained on, shared by the lines of their optimizer steps."""
    mask = rollouts.inputs.response_mask
    metrics = row_metrics(
        mask,
        rollouts.truncated,
        rollouts.rewards,
        rollouts.versions,
        batch.advantages,
        version=progress.step,
    )
    shaping = (shaped.rewards - rollouts.rewards).nansum() / max(len(rollouts), 1)
    metrics["reward/shaping"] = float(shaping)
    metrics["data/rollout_step"] = float(progress.rollout_step)
    return metrics
