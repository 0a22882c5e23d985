"""Evaluation on held-out prompts while reinforcement learning goes on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from oxrl.recipes.machine import Evaluation, Machine
from oxrl.recipes.scored_answers import evaluation_metrics
from oxrl.recipes.session import Session
from oxrl.runs.bars import Count
from oxrl.types import Metrics

# Between two looks at how far an evaluation of a run is, in seconds: short ones say nothing.
TOLD_EVERY_S = 1.0


def evaluate(machine: Machine, session: Session, held_out: Evaluation, step: int) -> Metrics:
    """The held-out prompts, answered with the weights of `step` and the same seeds each time.

    Raises:
        Stopped: a signal asked to stop.
    """
    draws = list(enumerate(held_out.prompts.in_order()))
    samples = held_out.answers.samples
    tell = partial(_forward, session)
    count = Count(tell, "evaluation", len(draws) * samples, every_s=TOLD_EVERY_S)
    answers = replace(held_out.answers, heard=count.one)
    with session.clock.phase("time/eval_s"):
        machine.source.settle(session.stopping)
        machine.delivery.deliver(step)
        try:
            return evaluation_metrics(answers.answer(draws), samples=samples)
        finally:
            machine.sampler.metrics()  # what it counted is no part of the next step


def _forward(session: Session, what: str, done: int, total: int) -> None:
    if done < total:  # its metrics tell of the end
        session.work(what, done, total, unit="responses", rate=0.0)
