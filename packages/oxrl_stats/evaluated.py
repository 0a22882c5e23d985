"""A model's answers to held-out prompts, as a comparison needs them: drawn now, or from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oxrl.commands.evaluator import Asked, Evaluator
from oxrl.errors import ConfigError, DataError, RunDirectoryError
from oxrl.recipes.scored_answers import in_groups
from oxrl.runs.files import read_records
from oxrl_stats.evaluation import rewards_of
from oxrl_stats.intervals import Numbers


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The rewards of one model on the prompts of one file.

    name: as it was asked for. uids, questions: of the prompts. rewards: [prompts, samples], NaN
    where a response has no score. noise: a digest of what all of its random choices are made of,
    the same for two models that share their noise.
    """

    name: str
    uids: tuple[str, ...]
    questions: tuple[str, ...]
    rewards: Numbers
    noise: str


def is_file_of_answers(name: str) -> bool:
    """True if it is a file as `oxrl eval --out` writes one.

    Args:
        name: of a model or a file.
    """
    path = Path(name)
    return path.is_file() and path.suffix in (".jsonl", ".json")


def check_measure_the_same(models: Sequence[Evaluator]) -> None:
    """Refuse to compare what is scored or sampled in different ways.

    Args:
        models: of which each is compared with the first.

    Raises:
        ConfigError: they differ; names the field and both values.
    """
    first, *others = models
    for other in others:
        for field, value in other.measured.items():
            expected = first.measured[field]
            if value != expected:
                raise ConfigError(
                    f"{field} is {expected!r} in {first.name} and {value!r} in {other.name}: they "
                    f"measure different things; write {field}=VALUE behind them, for both"
                )


def answered(model: Evaluator, asked: Asked) -> Evaluated:
    """Ask a model the prompts of a file.

    Args:
        model: that answers.
        asked: how.
    """
    rollouts = model.answer(asked)
    groups = in_groups(rollouts, asked.samples)
    prompts = [group[0].prompt for group in groups]
    return Evaluated(
        name=model.name,
        uids=tuple(prompt.uid for prompt in prompts),
        questions=tuple(str(prompt.question) for prompt in prompts),
        rewards=rewards_of(groups, samples=asked.samples),
        noise=noise_of(rollout.seed for rollout in rollouts),
    )


def noise_of(seeds: Iterable[object]) -> str:
    """A digest of the seeds of responses: two evaluations with the same one share their noise.

    Args:
        seeds: in the order of the responses.
    """
    return sha256(repr(list(seeds)).encode()).hexdigest()


class Line(NamedTuple):
    """One response in a file of answers; in the order of prompts and samples."""

    draw: int
    sample: int
    uid: str
    question: str
    reward: float
    seed: object


def read_answers(path: Path) -> Evaluated:
    """The answers in a file that `oxrl eval --out` wrote.

    Args:
        path: of the file.

    Raises:
        DataError: it is something else; names the line.
    """
    try:
        records = list(read_records(path))
    except RunDirectoryError as error:
        told = f"{path} is no evaluation; `oxrl eval RUN --out {path}`: {error}"
        raise DataError(told) from error
    lines = [_line(f"{path}, line {n}", one) for n, one in enumerate(records, start=1)]
    if not lines:
        raise DataError(f"{path} is no evaluation: it has no line; `oxrl eval RUN --out {path}`")
    lines.sort(key=lambda line: (line.draw, line.sample))
    groups = [list(group) for _, group in groupby(lines, lambda line: line.draw)]
    samples = max(map(len, groups))
    for group in groups:
        numbers = [line.sample for line in group]
        if numbers != list(range(samples)):
            raise DataError(
                f"{path}: draw {group[0].draw} has the samples {numbers}, and others {samples} of "
                "them: an evaluation that stopped half way; write it anew"
            )
    return Evaluated(
        name=str(path),
        uids=tuple(group[0].uid for group in groups),
        questions=tuple(group[0].question for group in groups),
        rewards=np.array([[line.reward for line in group] for group in groups]),
        noise=noise_of(line.seed for line in lines),
    )


def _line(where: str, line: Mapping[str, Any]) -> Line:
    if line.get("step", 0) != 0:
        raise DataError(
            f"{where}: step {line['step']} of a training run, and no evaluation; write one with "
            "`oxrl eval RUN --out FILE`"
        )
    try:
        return Line(
            draw=int(line["draw"]),
            sample=int(line["sample"]),
            uid=str(line["uid"]),
            question=str(line["prompt"]),
            reward=np.nan if line["reward"] is None else float(line["reward"]),
            seed=line["seed"],
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: not a response as `oxrl eval RUN --out FILE` writes it "
            f"({type(error).__name__}: {error})"
        ) from error
