"""Section `reward`, what scores a response, and the rewards that it asks for: one, or parts, each
with its own settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import field_validator

from oxrl.config.conditions import (
    CODE,
    has_one_reward,
    has_parts,
    has_reward,
    has_reward_model,
    runs_code,
    shares_options,
    shares_timeout,
    shares_workers,
)
from oxrl.config.field import RL, SAMPLING, Aka, Section, setting
from oxrl.config.sections.model import Learned
from oxrl.types import ENVIRONMENT

# Fields of the section -> keyword arguments of the reward `code`.
CODE_OPTIONS = {
    "sandbox": "sandbox",
    "sandbox_url": "url",
    "partial": "partial",
    "program_s": "program_s",
    "program_mb": "program_mb",
}

# A part's name is written in dotted paths, and in names of metrics between slashes.
PART_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
# Where rewards are normalised, unless `clip` says otherwise: the first success after many failures
# would be worth dozens. Source: OpenRLHF, --reward_clip_range, -10 to 10.
NORMALIZED_CLIP = 10.0


class RewardPart(Section):
    """One part of a reward of several, under `reward.parts`."""

    name: Learned = setting(..., "What scores a response in this part, as reward.name does.")
    weight: float = setting(
        1.0, "Times which its score is added to the others; 0: it is only reported."
    )
    optional: bool | Literal["group"] = setting(
        False,
        "Whether a response has a reward where this part fails: that of the other parts, to which "
        "it adds nothing; group: nor does it add to that of any other response to the prompt.",
    )
    options: dict[str, Any] = setting(
        {}, "As reward.options; of `code` also sandbox, url, partial, program_s and program_mb."
    )
    timeout_s: float | None = setting(
        None,
        "Seconds one response may take in this part; null: reward.timeout_s.",
        ge=0.01,
        le=86400,
        too_low="less is over before a worker can answer",
        why="more than a day is no limit",
    )
    workers: int | None = setting(
        None,
        "Processes of this part; null: reward.workers.",
        ge=1,
        le=1024,
        why="each is a process",
    )


class RewardConfig(Section):
    """The reward that scores a response."""

    name: Learned = setting(
        "",
        'A built-in reward ("math", "exact", "code", see docs/rewards.md), "path.py:function" or a '
        "reward model's folder, or the run that trained it (required for reinforcement learning; "
        "in supervised fine-tuning it scores what evaluations generate).",
        when=has_one_reward,
        aka=Aka(
            "reward_func",
            "reward_funcs",
            "reward_fn",
            "reward_function",
            "custom_reward_function",
            "remote_rm_url",
            note="a built-in reward, a reward model's folder, or path.py:function",
        ),
    )
    options: dict[str, Any] = setting(
        {}, "Keyword arguments of a built-in reward, by name.", when=shares_options
    )
    parts: dict[str, RewardPart] = setting(
        {},
        "Several rewards by names of your own instead of reward.name: the sum of their scores "
        "times their weights.",
        when=has_parts,
    )
    timeout_s: float = setting(
        10.0,
        "Seconds one response may take before its worker is killed; of reward `code`, seconds in "
        "which cases are begun: its worker is killed after 5 times that.",
        ge=0.01,
        le=86400,
        too_low="less is over before a worker can answer",
        why="more than a day is no limit",
        when=(
            has_reward,
            shares_timeout,
        ),
        resume="free",
    )
    workers: int = setting(
        1,
        "Reward processes.",
        ge=1,
        le=1024,
        why="each is a process",
        when=(
            has_reward,
            shares_workers,
        ),
        resume="free",
    )
    max_error_rate: float = setting(
        0.5,
        "Share of unscored responses that stops the run; 1: never.",
        ge=0,
        le=1,
        of=SAMPLING,
        resume="free",
    )
    normalize: Literal["none", "running", "batch"] = setting(
        "none",
        "Rewards less their mean, divided by their standard deviation, as training sees them: over "
        "all so far (running) or each rollout batch.",
        of=RL,
    )
    clip: float | None = setting(
        None,
        "Largest absolute value of a reward as training sees it, after reward.normalize; null: "
        "10 where rewards are normalised, else none.",
        of=RL,
        gt=0,
        le=1e6,
        too_low="a bound of 0 leaves nothing to learn from",
        why="one of millions bounds nothing",
    )
    actors: int = setting(
        0,
        "Ray actors that score by a reward model, each with a GPU of its own where the cluster has "
        "any; 0: it scores in the run's own process, or on the CPU of workers where several ranks "
        "train.",
        of=RL,
        ge=0,
        le=1024,
        why="each is a process",
        when=has_reward_model,
    )
    sandbox: Literal["strict", "basic", "off"] = setting(
        "strict",
        "Where programs run that the reward `code` judges: strict: namespaces, Landlock, seccomp; "
        "basic: without namespaces; off: a process like any other.",
        when=runs_code,
    )
    sandbox_url: str = setting(
        "",
        "URL of a SandboxFusion service that judges programs instead of this machine.",
        when=runs_code,
    )
    partial: bool = setting(
        False, "Score a program by the share of tests that hold.", when=runs_code
    )
    program_s: float = setting(
        5.0,
        "Seconds of processor time for a program, or for each of its cases.",
        ge=0.1,
        le=3600,
        too_low="no program starts in less",
        why="no program is waited for longer",
        when=runs_code,
    )
    program_mb: int = setting(
        1024,
        "Megabytes of memory for a program.",
        ge=16,
        le=1 << 20,
        too_low="no program starts in less",
        why="no machine has more",
        when=runs_code,
    )

    @property
    def bound(self) -> float | None:
        """Largest absolute value of a reward as training sees it; None: any."""
        if self.clip is None and self.normalize != "none":
            return NORMALIZED_CLIP
        return self.clip

    @property
    def exists(self) -> bool:
        """True if there is a reward at all: one, or several parts."""
        return bool(self.name or self.parts)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the one reward, or of each part; empty without a reward."""
        if self.parts:
            return tuple(part.name for part in self.parts.values())
        return (self.name,) if self.name else ()

    @field_validator("parts", mode="before")
    @classmethod
    def _check_parts(cls, parts: object) -> object:
        """Names that can stand in metrics, and are nobody else's; and parts that hold fields."""
        named = parts if isinstance(parts, dict) else {}
        for name, part in named.items():
            if not isinstance(part, dict | RewardPart):
                raise ValueError(
                    f"{name!r} is a part and holds fields, such as {{name: math, weight: 1.0}}"
                )
            if not PART_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} names a part, in metrics as well: 1 to 64 letters, digits, _ and -"
                )
            if name == ENVIRONMENT:
                raise ValueError(
                    f"{name!r} is what an episode's own rewards are called: choose another name"
                )
        return parts


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
    weight: float
    optional: bool | Literal["group"]


def asked_rewards(reward: RewardConfig) -> list[AskedReward]:
    """The one reward of a section, or every part of it, in order; empty without a reward."""
    parts = reward.parts
    if reward.name and not parts:
        own = _code_options(reward.name, reward)
        parts = {"": RewardPart.model_construct(name=reward.name, options=reward.options | own)}
    return [
        AskedReward(
            part=name,
            field=f"reward.parts.{name}" if name else "reward",
            name=part.name,
            options=_code_options(part.name, reward) | part.options,
            timeout_s=reward.timeout_s if part.timeout_s is None else part.timeout_s,
            workers=reward.workers if part.workers is None else part.workers,
            weight=part.weight,
            optional=part.optional,
        )
        for name, part in parts.items()
    ]


def _code_options(name: str, reward: RewardConfig) -> dict[str, object]:
    """Return what the section's fields say of the reward `code`; empty for any other."""
    if name != CODE:
        return {}
    return {argument: getattr(reward, field) for field, argument in CODE_OPTIONS.items()}
