"""The configuration of a run with another reward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from oxrl.config.checks.reward import check_reward
from oxrl.config.load import checked
from oxrl.config.overrides import apply_overrides
from oxrl.config.schema import Config
from oxrl.config.source import Problem, read_source


def load_reward_config(path: Path | str, overrides: Sequence[str]) -> Config:
    """The configuration of a run with another reward, to score what was sampled.

    Args:
        path: of the run.
        overrides: of `reward`; a name or parts take the place of the run's own, with its options.

    Raises:
        ConfigError: lists every problem with its place, field, value and rule.
    """
    source = read_source(path)
    if any(override.startswith(("reward.name=", "reward.parts=")) for override in overrides):
        for name in ("name", "parts", "options"):
            source.values.get("reward", {}).pop(name, None)
    for override in overrides:
        if not override.removeprefix("~").startswith("reward."):
            rule = "is not what scores: only reward.FIELD=VALUE can be given here"
            source.wrong(override.partition("=")[0], rule, f"override '{override}'")
    apply_overrides(source, overrides)
    return checked(source, _reward_problems, evaluates=True)


def _reward_problems(cfg: Config) -> Iterator[Problem]:
    if not cfg.reward.exists:
        rule = "is required: the run has no reward of its own; write reward.name=NAME"
        yield Problem("reward.name", rule)
    yield from check_reward(cfg)
