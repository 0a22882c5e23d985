"""The recorded samples of a run, scored by another reward: what commands of packages compare.

They see no configuration: a group comes with its lines and its new scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.reward_pools import build_rewards
from oxrl.config import Config
from oxrl.config.checks.usual import check_reward
from oxrl.config.given import apply_overrides
from oxrl.config.load import checked
from oxrl.config.load_evaluation import EVALUATED
from oxrl.config.source import Problem, read_source
from oxrl.errors import ConfigError, DataError
from oxrl.rewards.pools import GroupScorer
from oxrl.rollouts.episode_scores import EpisodeScorer
from oxrl.rollouts.stored import Line, stored_groups
from oxrl.runs.checkpoints import is_run
from oxrl.runs.waiting import Patience
from oxrl.types import Score

# Groups that the reward gets at once: enough for its workers, few enough to hold.
AT_ONCE = 64


class ScoredAgain(NamedTuple):
    """The responses to one prompt of a step, as samples.jsonl has them, and their new scores."""

    lines: Sequence[Line]
    scores: Sequence[Score]


def score_again(run: str | Path, overrides: Sequence[str]) -> Iterator[ScoredAgain]:
    """Yield the recorded groups of a run with the scores of another reward.

    Args:
        run: its directory; nothing in it is changed.
        overrides: of `reward`; `reward.name` or `reward.parts` take the place of the run's,
            anything else changes those.

    Raises:
        ConfigError: no such run, or no such reward.
        DataError: the run has no samples.
        RewardError: the reward cannot be loaded.
    """
    folder = Path(run)
    if not is_run(folder):
        raise ConfigError(f"{folder} is no run directory: there is no config.yaml of a run in it")
    samples = folder / "samples.jsonl"
    if not samples.is_file():
        raise DataError(f"{samples} is not there: only reinforcement learning records samples")
    cfg = load_reward_config(folder / "config.yaml", overrides)
    groups = stored_groups(samples, cfg.rollout.n_samples)
    found = False
    with closing(build_rewards(Assembly(cfg))) as pool:
        pool.start()
        scorer: GroupScorer = EpisodeScorer(pool) if cfg.environment.name else pool
        while stored := list(islice(groups, AT_ONCE)):
            found = True
            scores = scorer.score([one.group for one in stored], Patience())
            for one, new in zip(stored, scores, strict=True):
                yield ScoredAgain(one.lines, new)
    if not found:
        raise DataError(f"{samples} holds no sample yet")


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
        for reward_field in ("reward.name", "reward.parts", "reward.options"):
            source.values.pop(reward_field, None)
    for override in overrides:
        if not override.removeprefix("~").startswith("reward."):
            source.wrong(
                override.partition("=")[0],
                "is not what scores: only reward.FIELD=VALUE can be given here",
                f"override '{override}'",
            )
    apply_overrides(source, overrides)
    return checked(source, _reward_problems, EVALUATED)


def _reward_problems(cfg: Config) -> Iterator[Problem]:
    if not cfg.reward.exists:
        yield Problem(
            "reward.name", "is required: the run has no reward of its own; write reward.name=NAME"
        )
    yield from check_reward(cfg)
