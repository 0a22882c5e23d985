"""The reward that a section `reward` asks for: one, or parts, each with its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oxrl.config.sections.reward import RewardConfig, RewardPart

if TYPE_CHECKING:
    from oxrl.config.schema import Config

CODE = "code"
JUDGE = "judge"
# Fields of the section -> keyword arguments of the reward `code`.
CODE_OPTIONS = {
    "sandbox": "sandbox",
    "sandbox_url": "url",
    "partial": "partial",
    "program_s": "program_s",
    "program_mb": "program_mb",
}


@dataclass(frozen=True, kw_only=True)
class AskedReward:
    """One reward that a run asks for.

    part: its name among several; empty where it is the only one. field: of the config, where it
    stands: "reward", or "reward.parts.correct". options: keyword arguments of a built-in reward.
    timeout_s: for each response. workers: its processes.
    """

    part: str
    field: str
    name: str
    options: Mapping[str, object]
    timeout_s: float
    workers: int
    weight: float = 1.0
    optional: bool | Literal["group"] = False


def asked_rewards(reward: RewardConfig) -> list[AskedReward]:
    """The one reward of a section, or every part of it, in order; empty without a reward."""
    parts = reward.parts
    if reward.name and not parts:
        own = _code_options(reward.name, reward)
        parts = {"": RewardPart.model_construct(name=reward.name, options=reward.options | own)}
    asked: list[AskedReward] = []
    for name, part in parts.items():
        one = AskedReward(
            part=name,
            field=f"reward.parts.{name}" if name else "reward",
            name=part.name,
            options=_code_options(part.name, reward) | part.options,
            timeout_s=reward.timeout_s if part.timeout_s is None else part.timeout_s,
            workers=reward.workers if part.workers is None else part.workers,
            weight=part.weight,
            optional=part.optional,
        )
        asked.append(one)
    return asked


def runs_in_actors(cfg: Config, asked: AskedReward) -> bool:
    """True if it is a reward model that scores in Ray actors."""
    return cfg.reward.actors > 0 and is_folder(asked)


def runs_beside_policy(cfg: Config, asked: AskedReward) -> bool:
    """True if it is a reward model that scores on the run's device, in the process that trains.

    Where several processes train, it scores in Ray actors, or on the CPU of workers.
    """
    one_process = not cfg.train.engine.several_ranks
    return one_process and not cfg.reward.actors and is_folder(asked)


def is_folder(asked: AskedReward) -> bool:
    """True if it is a reward model."""
    return asked.name not in ("", CODE, JUDGE) and Path(asked.name).is_dir()


def _code_options(name: str, reward: RewardConfig) -> dict[str, object]:
    """Return what the section's fields say of the reward `code`; empty for any other."""
    if name != CODE:
        return {}
    return {argument: getattr(reward, field) for field, argument in CODE_OPTIONS.items()}
