"""The first half of reinforcement learning: sample, score, record; `run.only: rollouts`.

Steps are counted as a run counts them that trains, so the record is one that such a run can train
on (`rollout.from_samples`); the weights stay those it began with, whatever version they bear.
"""

from __future__ import annotations

from oxrl.assembly.assemble import RLSetup
from oxrl.config import Config
from oxrl.data.sample_record import sample_line
from oxrl.functional.metrics import data_metrics
from oxrl.recipes.progress import RolloutProgress
from oxrl.recipes.rl import count_step, finish_step
from oxrl.recipes.session import Session
from oxrl.rollouts.batch import TrainableRows, trainable_rows
from oxrl.rollouts.sync import RolloutStep
from oxrl.types import Metrics


def train(cfg: Config, session: Session) -> None:
    """Run until the samples of `run.steps` optimizer steps are there, from the newest checkpoint
    on.
    """
    setup = RLSetup(cfg, session.clock, session.stopping, session.pool)
    session.closing(setup.close)
    progress = session.restore(setup.saved, RolloutProgress())
    if progress.line:  # a signal came while this step was evaluated
        finish_step(cfg, setup, session, progress, 0)
    while progress.step < cfg.run.steps and not progress.good_enough:
        before = progress.step
        if setup.source.idle:
            with session.clock.phase("time/rollout_s"):
                setup.delivery.deliver(before)
        with session.saved_if_stopped(setup.saved, progress):
            sampled = setup.source.next(progress.draw, step=before, stop=session.stopping)
        delivered = setup.delivery.remember(sampled.rollouts)
        setup.ledger.count_sampling(sampled)
        rows = trainable_rows(sampled, setup.row_rules, version=before)
        record(cfg, session, sampled)

        found = row_metrics(rows) | delivered
        found |= count_step(setup, progress, sampled, rows, len(rows.places))
        progress.rollout_step += 1
        progress.draw = sampled.next_draw
        for _ in range(cfg.train.updates):
            if progress.line:
                session.record_line(progress)
            progress.step += 1
            progress.line = found | {"data/rollout_step": float(progress.rollout_step)}
            progress.tokens = found["data/tokens"] / cfg.train.updates
        finish_step(cfg, setup, session, progress, before)
    session.finish(progress.step)


def record(cfg: Config, session: Session, sampled: RolloutStep) -> None:
    """Write every sample; none has an advantage."""
    lines = [
        sample_line(rollout, step=sampled.step, advantage=None)
        for rollout in (*sampled.rollouts, *sampled.baselines)
    ]
    session.recorder.record_samples(lines)
    if cfg.run.record == "tokens":
        session.recorder.keep_rollouts(sampled.step)


def row_metrics(rows: TrainableRows) -> Metrics:
    """Of what was sampled, what could be trained on."""
    batch = rows.batch
    return data_metrics(batch.inputs.response_mask, batch.truncated, batch.rewards)
