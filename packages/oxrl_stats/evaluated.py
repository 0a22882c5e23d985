"""A model's answers to held-out prompts, as a comparison needs them: drawn now, or from a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from oxrl.assembly.assembly import Assembly
from oxrl.checkpoint.targets import find_target
from oxrl.commands.evaluate import answers_to, evaluation_config, held_out_file, is_config
from oxrl.config import Config
from oxrl.errors import ConfigError, DataError
from oxrl.modelfiles.hub import locate
from oxrl.recipes.scored_answers import evaluation_seed, in_groups
from oxrl.runs.files import read_records
from oxrl.types import Rollout
from oxrl_stats.intervals import Numbers

# Fields that two configurations must have alike for their rewards to measure the same.
COMPARED = {
    "reward": ("name", "parts", "options"),
    "environment": ("name", "options", "max_turns", "tool_role"),
    "rollout": ("max_tokens", "top_p", "top_k", "context"),
}
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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How the models of a comparison are asked.

    overrides: of the configuration. data: files of prompts; none: `data.eval` of the first run.
    samples, temperature, seed: as of `oxrl eval`; None: those of the first run.
    """

    overrides: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    samples: int | None = None
    temperature: float | None = None
    seed: int | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Overrides of every configuration."""
        # What a run was trained on need not be here any more.
        held_out = [f"data.eval={json.dumps(name)}" for name in self.data[:1]]
        return (*held_out, *self.overrides)


def is_file_of_answers(name: str) -> bool:
    """True if it is what `oxrl eval --out` writes."""
    path = Path(name)
    return path.is_file() and path.suffix in (".jsonl", ".json")


def configurations(names: Sequence[str], asked: Asked, pins: ExitStack) -> list[Config]:
    """The configuration by which each model is evaluated.

    A model of no run, and one of a run that has no reward, is evaluated as the first run is that
    has one.

    Raises:
        ConfigError: two runs score or sample in different ways; names the field and both values.
    """
    configs: dict[str, Config] = {}
    for name in names:
        if is_config(name) or find_target(name, pins).run is not None:
            cfg, _ = evaluation_config(name, asked.fields, pins)
            if _has_reward(cfg):
                configs[name] = cfg
    if not configs:
        return [_plain(name, asked, pins) for name in names]
    (first_name, first), *others = configs.items()
    for name, cfg in others:
        _refuse_other(first_name, first, name, cfg)
    for name in names:
        if name not in configs:
            model = find_target(name, pins).model
            own = (f"model.name={json.dumps(model)}", *asked.fields)
            configs[name], _ = evaluation_config(first_name, own, pins)
    return [configs[name] for name in names]


def _plain(name: str, asked: Asked, pins: ExitStack) -> Config:
    """The configuration of a model where no run says how it is evaluated."""
    cfg, _ = evaluation_config(name, asked.fields, pins)
    if _has_reward(cfg):
        return cfg
    raise ConfigError(
        f"reward.name: nothing scores what {name} answers; write reward.name=NAME, or compare it "
        "with a run that has a reward"
    )


def _has_reward(cfg: Config) -> bool:
    return cfg.reward.exists or bool(cfg.environment.name)


def _refuse_other(first_name: str, first: Config, name: str, cfg: Config) -> None:
    """Refuse to compare what was scored or sampled in another way."""
    for field, one, other in _compared(first, cfg):
        if one != other:
            raise ConfigError(
                f"{field} is {one!r} in {first_name} and {other!r} in {name}: they measure "
                f"different things; write {field}=VALUE behind them, which holds for both"
            )


def _compared(first: Config, other: Config) -> Iterator[tuple[str, Any, Any]]:
    for section, names in COMPARED.items():
        one, two = (getattr(cfg, section).model_dump() for cfg in (first, other))
        yield from ((f"{section}.{name}", one[name], two[name]) for name in names)


def files_of(asked: Asked, cfg: Config, run: Path | None) -> list[str]:
    """The files of prompts that are asked, as they are here."""
    if asked.data:
        return [str(locate(name, None)) for name in asked.data]
    return [held_out_file(cfg, run)]


def answered(
    name: str, cfg: Config, path: str, *, samples: int, temperature: float, seed: int
) -> Evaluated:
    """Ask a model the prompts of a file.

    Args:
        name: of the model, to be told by.
        cfg: by which it is evaluated.
        path: of the file.
        samples, temperature, seed: of the responses.
    """
    rollouts = answers_to(
        Assembly(cfg), path, samples=samples, temperature=temperature, seed=evaluation_seed(seed)
    )
    noise = noise_of(rollout.seed for rollout in rollouts)
    if cfg.inference_engine.name != "local":
        noise = ""
    return evaluated(name, rollouts, samples, noise=noise)


def noise_of(seeds: Iterable[object]) -> str:
    """What says whether two evaluations drew with the same noise: a digest of their seeds."""
    return sha256(repr(list(seeds)).encode()).hexdigest()


def evaluated(name: str, rollouts: Sequence[Rollout], samples: int, *, noise: str) -> Evaluated:
    """The rewards of rollouts, `samples` in a row per prompt."""
    groups = in_groups(rollouts, samples)
    rewards = [[_number(rollout.score.value) for rollout in group] for group in groups]
    prompts = [group[0].prompt for group in groups]
    return Evaluated(
        name=name,
        uids=tuple(prompt.uid for prompt in prompts),
        questions=tuple(str(prompt.question) for prompt in prompts),
        rewards=np.array(rewards, dtype=float).reshape(-1, samples),
        noise=noise,
    )


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
