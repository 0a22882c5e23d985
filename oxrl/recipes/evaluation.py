"""Evaluation on held-out prompts while reinforcement learning goes on."""

from __future__ import annotations

from functools import partial

from oxrl.assembly.assemble import RLSetup
from oxrl.config import Config
from oxrl.data.prompts import PromptDataset
from oxrl.recipes.scored_answers import ScoredSampler, evaluation_metrics, evaluation_seed
from oxrl.recipes.session import Session
from oxrl.runs.bars import Count
from oxrl.types import Metrics

# Between two looks at how far an evaluation of a run is, in seconds: short ones say nothing.
TOLD_EVERY_S = 1.0


def evaluate(
    cfg: Config, setup: RLSetup, session: Session, held_out: PromptDataset, step: int
) -> Metrics:
    """The held-out prompts, answered with the weights of `step` and the same seeds each time.

    Args:
        held_out: `data.eval`, under `rollout.eval_*`.

    Raises:
        Stopped: a signal asked to stop.
    """
    draws = list(enumerate(held_out.in_order()))
    responses = len(draws) * cfg.rollout.eval_samples
    tell = partial(_told, session)
    scored = ScoredSampler(
        sampler=setup.sampler,
        scorer=setup.scorer,
        sampling=setup.eval_sampling,
        samples=cfg.rollout.eval_samples,
        seed=evaluation_seed(cfg),
        deadline_s=cfg.run.waits.seconds["rollout"],
        stop=session.stopping,
        heard=Count(tell, "evaluation", responses, every_s=TOLD_EVERY_S).one,
    )
    with session.clock.phase("time/eval_s"):
        setup.source.settle(session.stopping)
        setup.delivery.deliver(step)
        try:
            return evaluation_metrics(scored.answer(draws), samples=scored.samples)
        finally:
            setup.sampler.metrics()  # what it counted is no part of the next step


def _told(session: Session, what: str, done: int, total: int) -> None:
    if done < total:  # its metrics tell of the end
        session.work(what, done, total, unit="responses", rate=0.0)
