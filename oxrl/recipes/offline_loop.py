"""The loop of every recipe that learns from the rows of a file, not from samples of its own."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from oxrl.checkpoint.verify import why_not_best
from oxrl.data.dataset import Dataset, Identified
from oxrl.data.order import RowSource
from oxrl.engines.train import TrainEngine
from oxrl.engines.train.trainer import Trainer
from oxrl.recipes.session import Progress, Session
from oxrl.recipes.step import apply_step
from oxrl.types import Images, LossFn, Metrics, TrainBatch, Want

log = logging.getLogger(__name__)
Unit = TypeVar("Unit", bound=Identified)
Memory = dict[str, float]
# Metrics of an optimizer step, and tokens processed.
Stepped = tuple[Metrics, float]


@dataclass(kw_only=True)
class RowsProgress(Progress):
    """memory: what a step's statistics carry on. best: the best evaluation so far."""

    memory: Memory = field(default_factory=Memory)
    best: float | None = None


@dataclass(kw_only=True)
class Learner(ABC, Generic[Unit]):
    """A model that learns from rows, and what its recipe adds to the loop.

    engine: of the model. session: of the run. pad_id: what rows are padded with. images: those of
    the rows; None: they have none. rows_per_step: read at once in evaluations too. best_metric: of
    an evaluation, decides which weights `run.keep_best` keeps.
    """

    engine: Trainer
    session: Session
    pad_id: int
    images: Images
    rows_per_step: int
    best_metric: str = "eval/accuracy"
    lower_is_better: bool = False

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """Subdirectory of a checkpoint -> engine; "." is the one that learns."""
        return {".": self.engine}

    def learn(
        self, batch: TrainBatch, loss: LossFn, want: Want, units: list[Unit], *, step: int
    ) -> Stepped:
        """Take optimizer step `step` on a batch of `units`: its metrics, and tokens processed."""
        metrics = apply_step(self.engine, self.session, batch, loss, want, step=step)
        metrics["data/rows"] = float(len(units))
        return metrics, float(batch.inputs.attention_mask.sum())

    @abstractmethod
    def update(self, units: list[Unit], step: int, memory: Memory) -> Stepped:
        """Optimizer step `step` on `units`: its metrics, and tokens processed."""

    @abstractmethod
    def evaluate(self, batches: Iterable[list[Unit]]) -> Metrics:
        """Measure how the weights as they are do on other rows, `rows_per_step` at a time."""

    def batches(self, held_out: Dataset[Unit]) -> Iterator[list[Unit]]:
        """The rows in order; between two batches of them the session looks for a signal.

        Raises:
            Stopped: a signal asked to stop.
        """
        for units in held_out.batches(self.rows_per_step):
            self.session.look()
            yield units


class OfflineMachine(NamedTuple, Generic[Unit]):
    """A run that learns from rows, put together; `oxrl.assembly.assemble_offline` does that.

    rows: of `data.train`, in an order that `seed` decides. held_out: None without `data.eval`.
    steps: optimizer steps. keep_best: the best weights of all evaluations are kept.
    """

    learner: Learner[Unit]
    rows: RowSource[Unit]
    held_out: Dataset[Unit] | None
    seed: int
    steps: int
    keep_best: bool


def train(machine: OfflineMachine[Unit], session: Session) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if any."""
    learner = machine.learner
    progress = session.restore(learner.engines, RowsProgress())
    forget_lost_best(session, progress)
    if progress.line:  # a signal came while this step was evaluated
        finish_step(machine, session, progress, 0)
    while progress.step < machine.steps and not progress.good_enough:
        # The rows of this step are a function of the step and the seed alone.
        draws = range(progress.draw, progress.draw + learner.rows_per_step)
        units = [machine.rows.at(draw, seed=machine.seed) for draw in draws]
        before = progress.step
        with session.clock.phase("time/update_s"):
            metrics, tokens = learner.update(units, before + 1, progress.memory)
        progress.step += 1
        progress.draw = draws.stop
        progress.line = metrics
        progress.tokens = tokens
        finish_step(machine, session, progress, before)
    session.finish(progress.step)


def finish_step(
    machine: OfflineMachine[Unit], session: Session, progress: RowsProgress, before: int
) -> None:
    """Evaluate where it is time for that, write the step's line, save where it is time."""
    learner = machine.learner
    if machine.held_out is not None and session.eval_due(before, progress.step):
        with (
            session.clock.phase("time/eval_s"),
            session.saved_if_stopped(learner.engines, progress),
        ):
            found = learner.evaluate(learner.batches(machine.held_out))
        progress.line = progress.line | found
        score = found[learner.best_metric]
        session.note_score(progress, score, lower=learner.lower_is_better)
        if machine.keep_best:
            keep_best(session, learner, progress, score)
    session.record_line(progress)
    session.boundary(learner.engines, progress)


def forget_lost_best(session: Session, progress: RowsProgress) -> None:
    """Forget the best score where `best/` is not the model that had it: it is written anew."""
    problem = ""
    if progress.best is not None and session.ranks.first:
        problem = why_not_best(session.run.path, progress.step)
    problem = session.ranks.agree(problem)
    if problem:
        log.warning("best/ is not the best of the steps so far: %s; it is written anew", problem)
        progress.best = None


def keep_best(
    session: Session, learner: Learner[Unit], progress: RowsProgress, found: float
) -> None:
    """Keep the weights as they are where no evaluation before was as good."""
    score = -found if learner.lower_is_better else found
    # A score that is not a number is no better than none, and never stays the one to beat.
    to_beat = -math.inf if progress.best is None else progress.best
    if session.ranks.agree(score > to_beat):
        session.keep_best(learner.engines["."], progress.step)
        progress.best = score
