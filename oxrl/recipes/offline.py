"""The loop of everything that learns from given rows (supervised, preference, reward model), and
its one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oxrl.config import Config
from oxrl.data.order import open_rows
from oxrl.engines.train.base import TrainEngine
from oxrl.recipes.session import Progress, Session
from oxrl.types import Metrics


@dataclass(kw_only=True)
class RowsProgress(Progress):
    """memory: what a step's statistics carry on, JSON. best: the best evaluation so far."""

    memory: dict[str, Any] = field(default_factory=dict[str, Any])
    best: float | None = None


def run_steps(
    cfg: Config,
    session: Session,
    engines: Mapping[str, TrainEngine],
    rows: Callable[..., Any],
    step_on: Callable[[list[Any], int, dict[str, Any]], tuple[Metrics, float]],
    evaluate: Callable[[Any], Metrics],
    *,
    best: str,
    lower_is_better: bool,
) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if there is one.

    Args:
        rows: (path of a data file, whether it is data.eval) -> its rows.
        step_on: (rows, number of the step, memory) -> metrics and tokens processed; checkpoints
            keep the memory, JSON.
        best: the metric of `evaluate` that decides which weights `run.keep_best` keeps.
    """
    data = open_rows(
        cfg.data.train, lambda path: rows(path, False), per_step=cfg.data.rows_per_step
    )
    held_out = None if cfg.data.eval is None else rows(cfg.data.eval, True)
    progress = session.restore(engines, RowsProgress())
    while progress.step < cfg.run.steps:
        # The rows of this step are a function of the step and the seed alone.
        start, first = progress.step, progress.draw
        units = [
            data.at(draw, seed=cfg.run.seed)
            for draw in range(first, first + cfg.data.rows_per_step)
        ]
        with session.phase("time/update_s"):
            metrics, tokens = step_on(units, start + 1, progress.memory)
        progress.step = start + 1
        progress.draw = first + cfg.data.rows_per_step
        if held_out is not None and session.eval_due(start, progress.step):
            with session.phase("time/eval_s"):
                metrics |= evaluate(held_out)
            score = -metrics[best] if lower_is_better else metrics[best]
            # A score that is not a number is no better than none, and never stays the one to beat.
            to_beat = -math.inf if progress.best is None else progress.best
            if cfg.run.keep_best and session.ranks.agree(score > to_beat):
                session.keep_best(engines["."])
                progress.best = score
        session.record(progress.step, metrics, tokens=tokens)
        session.boundary(engines, progress)
    session.finish(progress.step)
