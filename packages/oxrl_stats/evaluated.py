"""A model's answers to held-out prompts, as a comparison needs them: drawn now, or from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from oxrl.commands.evaluator import Asked, Evaluator
from oxrl.errors import ConfigError, DataError
from oxrl.recipes.scored_answers import in_groups
from oxrl.runs.files import read_records
from oxrl.types import Rollout
from oxrl_stats.intervals import Numbers

# Of a line that `oxrl eval --out` writes.
KEPT = ("uid", "prompt", "reward", "seed")


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The rewards of one model on the prompts of one file.

    name: as it was asked for. uids, questions: of the prompts. rewards: [prompts, samples], NaN
    where a response has no score. noise: of what all of its random choices are made, the same for
    two models that share their noise; empty: of the sampler's own.
    """

    name: str
    uids: tuple[str, ...]
    questions: tuple[str, ...]
    rewards: Numbers
    noise: str

    def rows(self, chosen: np.ndarray) -> Evaluated:
        """The prompts at some places.

        Args:
            chosen: of integers.
        """
        return Evaluated(
            name=self.name,
            uids=tuple(self.uids[place] for place in chosen),
            questions=tuple(self.questions[place] for place in chosen),
            rewards=self.rewards[chosen],
            noise=self.noise,
        )


def is_file_of_answers(name: str) -> bool:
    """True if it is what `oxrl eval --out` writes."""
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
    noise = noise_of(rollout.seed for rollout in rollouts) if model.shares_noise else ""
    groups = in_groups(rollouts, asked.samples)
    prompts = [group[0].prompt for group in groups]
    return Evaluated(
        name=model.name,
        uids=tuple(prompt.uid for prompt in prompts),
        questions=tuple(str(prompt.question) for prompt in prompts),
        rewards=rewards_of(groups),
        noise=noise,
    )


def rewards_of(groups: Sequence[Sequence[Rollout]]) -> Numbers:
    """Rewards of the responses to each prompt, [prompts, samples]; NaN where there is none.

    Args:
        groups: as many responses to each prompt.
    """
    return np.array([[_number(one.score.value) for one in group] for group in groups], dtype=float)


def noise_of(seeds: Iterable[object]) -> str:
    """What says whether two evaluations drew with the same noise: a digest of their seeds."""
    return sha256(repr(list(seeds)).encode()).hexdigest()


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)


def read_answers(path: Path) -> Evaluated:
    """What `oxrl eval --out` wrote.

    Raises:
        DataError: it is something else; names the line.
    """
    groups: dict[int, dict[int, Mapping[str, Any]]] = {}
    for number, line in enumerate(read_records(path), start=1):
        try:
            group = groups.setdefault(int(line["draw"]), {})
            group[int(line["sample"])] = {name: line[name] for name in KEPT}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}, line {number}: not a response as `oxrl eval --out FILE` writes it "
                f"({type(error).__name__}: {error})"
            ) from error
    if not groups:
        raise DataError(f"{path} is no evaluation: it has no line; `oxrl eval RUN --out {path}`")
    ordered = [groups[draw] for draw in sorted(groups)]
    samples = len(ordered[0])
    for draw, group in zip(sorted(groups), ordered, strict=True):
        if sorted(group) != list(range(samples)):
            raise DataError(
                f"{path}: draw {draw} has the samples {sorted(group)}, and the first one {samples} "
                "of them: an evaluation that stopped half way; write it anew"
            )
    lines = [[group[place] for place in range(samples)] for group in ordered]
    try:
        rewards = [[_number(line["reward"]) for line in group] for group in lines]
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: a reward is no number ({error})") from error
    return Evaluated(
        name=str(path),
        uids=tuple(str(group[0]["uid"]) for group in ordered),
        questions=tuple(str(group[0]["prompt"]) for group in ordered),
        rewards=np.array(rewards, dtype=float),
        noise=noise_of(line["seed"] for group in lines for line in group),
    )
