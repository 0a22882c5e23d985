"""The first half of reinforcement learning: sample, score, record; `run.only: rollouts`.

Steps are counted as a run counts them that trains, so the record is one that such a run can train
on (`rollout.from_samples`); the weights stay those it began with, whatever version they bear.
"""

from __future__ import annotations

from oxrl.functional.metrics import data_metrics
from oxrl.recipes.machine import Machine
from oxrl.recipes.rl import finish_step, write_samples
from oxrl.recipes.session import RolloutProgress, Session
from oxrl.rollouts.batch import sample_metrics, trainable_rows


def train(machine: Machine, session: Session) -> None:
    """Run until the samples of `run.steps` optimizer steps are there, from the newest checkpoint
    on.
    """
    updates = machine.updates
    progress = session.restore(machine.saved, RolloutProgress())
    if progress.line:  # a signal came while this step was evaluated
        finish_step(machine, session, progress, progress.step - updates)
    while progress.step < machine.steps and not progress.good_enough:
        before = progress.step
        with session.saved_if_stopped(machine.saved, progress):
            sampled = machine.source.next(progress.draw, step=before)
        machine.ledger.count_sampling(sampled)
        rows = trainable_rows(sampled, machine.row_rules, version=before)
        write_samples(session, sampled, {})
        if machine.keeps_tokens:
            session.recorder.keep_rollouts(sampled.step)

        batch = rows.batch
        found = data_metrics(batch.inputs.response_mask, batch.truncated, batch.rewards)
        found |= sampled.delivered
        found |= sample_metrics(
            progress.samples,
            sampled,
            rows,
            trained=len(rows.places),
            in_flight=machine.source.in_flight,
        )
        progress.rollout_step += 1
        progress.draw = sampled.next_draw
        for _ in range(updates):
            if progress.line:
                session.record_line(progress)
            progress.step += 1
            progress.line = found | {"data/rollout_step": float(progress.rollout_step)}
            progress.tokens = found["data/tokens"] / updates
        finish_step(machine, session, progress, before)
    session.finish(progress.step)
