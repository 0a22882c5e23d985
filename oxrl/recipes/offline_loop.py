"""The loop of every recipe that learns from the rows of a file, not from samples of its own."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import nn

from oxrl.assembly.assembly import build_images, build_tokenizer, build_trainer
from oxrl.config import Config
from oxrl.data.dataset import Dataset, Identified
from oxrl.data.order import open_rows
from oxrl.engines.train.base import TrainEngine
from oxrl.recipes.early_stopping import note_score
from oxrl.recipes.progress import Progress
from oxrl.recipes.session import Session
from oxrl.types import Metrics

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


class Learner(ABC, Generic[Unit]):
    """A model that learns from rows, and what its recipe adds to the loop.

    engines: subdirectory of a checkpoint -> engine; "." is the one that learns. best_metric: of an
    evaluation, decides which weights `run.keep_best` keeps.
    """

    best_metric = "eval/accuracy"
    lower_is_better = False

    def __init__(self, cfg: Config, session: Session, model: nn.Module) -> None:
        self.cfg = cfg
        self.session = session
        self.tokenizer = build_tokenizer(cfg)
        self.images = build_images(cfg)
        self.engine = build_trainer(cfg, model, self.tokenizer, ranks=session.ranks)
        self.engines: dict[str, TrainEngine] = {".": self.engine}
        self.pad_id = int(self.tokenizer.pad_token_id)  # pyright: ignore

    @abstractmethod
    def load(self, path: str, *, held_out: bool) -> Dataset[Unit]:
        """The rows of a data file, or of data.eval."""

    @abstractmethod
    def update(self, units: list[Unit], step: int, memory: Memory) -> Stepped:
        """Optimizer step `step` on `units`: its metrics, and tokens processed."""

    @abstractmethod
    def evaluate(self, held_out: LookedAt[Unit]) -> Metrics:
        """How the weights as they are do on other rows."""


def learn(cfg: Config, session: Session, learner: Learner[Unit]) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if any."""
    per_step = cfg.data.rows_per_step
    data = open_rows(
        cfg.data.train, lambda path: learner.load(path, held_out=False), per_step=per_step
    )
    held_out = None
    if cfg.data.eval is not None:
        held_out = learner.load(cfg.data.eval, held_out=True)
    progress = session.restore(learner.engines, RowsProgress())
    forget_lost_best(session, progress)
    if progress.line:  # a signal came while this step was evaluated
        finish_step(session, learner, held_out, progress, 0)
    while progress.step < cfg.run.steps and not progress.good_enough:
        # The rows of this step are a function of the step and the seed alone.
        draws = range(progress.draw, progress.draw + per_step)
        units = [data.at(draw, seed=cfg.run.seed) for draw in draws]
        before = progress.step
        with session.clock.phase("time/update_s"):
            metrics, tokens = learner.update(units, before + 1, progress.memory)
        progress.step += 1
        progress.draw += per_step
        progress.line = metrics
        progress.tokens = tokens
        finish_step(session, learner, held_out, progress, before)
    session.finish(progress.step)


def finish_step(
    session: Session,
    learner: Learner[Unit],
    held_out: Dataset[Unit] | None,
    progress: RowsProgress,
    before: int,
) -> None:
    """Evaluate where it is time for that, write the step's line, save where it is time."""
    if held_out is not None and session.eval_due(before, progress.step):
        with (
            session.clock.phase("time/eval_s"),
            session.saved_if_stopped(learner.engines, progress),
        ):
            found = learner.evaluate(LookedAt(held_out, session))
        progress.line = progress.line | found
        score = found[learner.best_metric]
        note_score(learner.cfg, session, progress, score, lower=learner.lower_is_better)
        if learner.cfg.run.keep_best:
            keep_best(session, learner, progress, score)
    session.record_line(progress)
    session.boundary(learner.engines, progress)


@dataclass(frozen=True)
class LookedAt(Generic[Unit]):
    """Held-out rows; between two batches of them the session looks for a signal."""

    rows: Dataset[Unit]
    session: Session

    def batches(self, size: int) -> Iterator[list[Unit]]:
        """The rows in order, `size` at a time.

        Raises:
            Stopped: a signal asked to stop.
        """
        for units in self.rows.batches(size):
            self.session.look()
            yield units


def forget_lost_best(session: Session, progress: RowsProgress) -> None:
    """Where `best/` is not what the checkpoint's best score is of, it is written anew."""
    problem = ""
    if progress.best is not None and session.ranks.first:
        from oxrl.checkpoint.verify import why_not_best  # a run that begins has none

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
