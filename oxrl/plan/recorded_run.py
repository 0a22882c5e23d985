"""Lengths and seconds that a run has recorded: `oxrl plan CONFIG --like RUN` goes by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import StatisticsError, fmean, linear_regression
from typing import Any

from oxrl.errors import ConfigError, DataError
from oxrl.flat_config import recorded_config
from oxrl.runs.checkpoints import is_run
from oxrl.runs.files import read_numbers, read_records

# What of a step's seconds is no training.
OTHERWISE = ("time/rollout_s", "time/eval_s", "time/checkpoint_s", "time/setup_s")


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Lengths and seconds of a run, for the plan of another one.

    folder: of the run. fields: its configuration, dotted path -> value. lengths: tokens of every
    response that has some. round_s: seconds of a decode round without rows. row_s: what each row
    of a sampler adds to it. train_s: seconds in which a batch is trained.
    """

    folder: Path
    fields: Mapping[str, Any]
    lengths: Sequence[int]
    round_s: float
    row_s: float
    train_s: float


def read_recorded_run(folder: Path) -> RecordedRun:
    """Read what a run has recorded.

    Args:
        folder: its directory.

    Raises:
        ConfigError: it is no run directory.
        DataError: the run has no samples, or one is not as a run writes it; it has noted no decode
            round, or sampled while it trained.
    """
    if not is_run(folder):
        raise ConfigError(
            f"--like {folder} is no run directory: there is no config.yaml of a run in it"
        )
    fields = recorded_config(folder)
    lengths = _lengths(folder / "samples.jsonl")
    # They work at the same time, and their rounds are counted together.
    others = ("inference_engine.processes", "inference_engine.actors")
    samplers = max(1, *(fields.get(name, 0) for name in others))
    round_s, row_s, train_s = _seconds(folder / "metrics.jsonl", samplers)
    return RecordedRun(
        folder=folder,
        fields=fields,
        lengths=lengths,
        round_s=round_s,
        row_s=row_s,
        train_s=train_s,
    )


def _lengths(path: Path) -> list[int]:
    """Read the tokens of each response; those of none take no round."""
    if not path.is_file():
        raise DataError(
            f"{path} is not there: only reinforcement learning records samples; name such a run "
            "behind --like"
        )
    lengths: list[int] = []
    for number, line in enumerate(read_records(path), start=1):
        versions = line.get("versions")
        try:
            ends = [int(end) for _, _, end in (versions or [])[-1:]]
        except (TypeError, ValueError):
            ends = [0]
        if versions is None or 0 in ends:
            raise DataError(
                f"{path}, line {number}: versions = {versions!r} says of no token that it was "
                "sampled, which no run writes: restore the file from a copy"
            )
        lengths += ends
    if not lengths:
        raise DataError(f"{path} holds no response with a token: name another run behind --like")
    return lengths


def _seconds(path: Path, samplers: int) -> tuple[float, float, float]:
    """Read those of a round without rows, what each row adds, and those that a batch trains."""
    lines = [*read_numbers(path)]
    steps = [line for line in lines if line.get("rollout/decode_steps")]
    if not steps or any(line.get("data/staleness_max") for line in steps):
        raise DataError(
            f"{path} does not say what a decode round takes: name a run behind --like that has "
            "sampled with rollout.max_staleness=0"
        )
    rows = [line["rollout/mean_active_rows"] for line in steps]
    rounds = [samplers * line["time/rollout_s"] / line["rollout/decode_steps"] for line in steps]
    try:
        rise, _ = linear_regression(rows, rounds)
    except StatisticsError:  # of one step, or as many rows in all of them
        rise = 0.0
    # A round takes something without rows, and no less with more of them.
    row_s = max(0.0, min(rise, 0.9 * fmean(rounds) / fmean(rows)))
    otherwise = sum(line.get(name, 0.0) for line in lines for name in OTHERWISE)
    trained = sum(line["time/step_s"] for line in lines) - otherwise
    return fmean(rounds) - row_s * fmean(rows), row_s, trained / len(steps)
