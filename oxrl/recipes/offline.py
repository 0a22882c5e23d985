"""The loop of everything that learns from given rows (supervised, preference, reward model), and
its one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from oxrl.config import Config
from oxrl.data.order import open_rows
from oxrl.engines.train.base import TrainEngine, Want
from oxrl.recipes.session import Progress, Session, all_finite
from oxrl.types import LossFn, Metrics, Output, TrainBatch


def run_steps(
    cfg: Config,
    session: Session,
    engines: Mapping[str, TrainEngine],
    rows: Callable[..., Any],
    step_on: Callable[[list[Any], int, Progress], tuple[Metrics, float]],
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
    progress = session.restore(engines, {"step": 0, "draw": 0, "memory": {}, "best": None})
    while progress["step"] < cfg.run.steps:
        # The rows of this step are a function of the step and the seed alone.
        start, first = progress["step"], progress["draw"]
        units = [
            data.at(draw, seed=cfg.run.seed)
            for draw in range(first, first + cfg.data.rows_per_step)
        ]
        with session.phase("time/update_s"):
            metrics, tokens = step_on(units, start + 1, progress["memory"])
        progress |= {"step": start + 1, "draw": first + cfg.data.rows_per_step}
        if held_out is not None and session.eval_due(start, progress["step"]):
            with session.phase("time/eval_s"):
                metrics |= evaluate(held_out)
            score = -metrics[best] if lower_is_better else metrics[best]
            # A score that is not a number is no better than none, and never stays the one to beat.
            to_beat = -math.inf if progress["best"] is None else progress["best"]
            if cfg.run.keep_best and session.ranks.agree(score > to_beat):
                session.keep_best(engines["."])
                progress["best"] = score
        session.record(progress["step"], metrics, tokens=tokens)
        session.boundary(engines, progress)
    session.finish(progress["step"])


def apply_step(
    engine: TrainEngine,
    session: Session,
    batch: TrainBatch,
    loss_fn: LossFn,
    want: Want,
    *,
    step: int,
) -> Metrics:
    """One optimizer step, refused and dumped when something is not finite."""
    _, metrics, finite = gradients(engine, batch, loss_fn, want)
    metrics |= engine.optim_step() if finite else engine.skip_step()
    if metrics["update/skipped"]:
        session.dump(
            step, {"tokens": batch.inputs.tokens, "response_mask": batch.inputs.response_mask}
        )
    return metrics


def gradients(
    engine: TrainEngine, batch: TrainBatch, loss_fn: LossFn, want: Want
) -> tuple[Output, Metrics, bool]:
    """Add the gradient of one engine: what it said, the loss and its metrics, and whether all of
    that is finite.
    """
    mask, given = (
        batch.inputs.response_mask,
        (value for value in vars(batch).values() if isinstance(value, Tensor)),
    )
    if not all_finite(
        *(x for x in given if x.shape == mask.shape and x.is_floating_point()), mask=mask
    ):
        return Output(), {"update/loss": math.nan}, False
    output = engine.forward_backward(batch, loss_fn, want)
    with torch.no_grad():
        loss, metrics = loss_fn(output, batch)
    finite = bool(loss.isfinite()) and all_finite(
        output.logprobs, output.entropy, output.values, mask=mask
    )
    return (
        output,
        {"update/loss": float(loss)} | {name: float(value) for name, value in metrics.items()},
        finite,
    )
