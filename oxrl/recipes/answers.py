"""What answers prompts and what scores the answers: in one turn, or in episodes of several."""

from __future__ import annotations

from contextlib import ExitStack

from oxrl.config import Config
from oxrl.engines.sample.base import RolloutEngine
from oxrl.errors import required
from oxrl.recipes.build import Limits
from oxrl.recipes.features.base import Feature
from oxrl.rewards.base import GroupScorer
from oxrl.runs.patience import StopAsked
from oxrl.types import Prompt


def answering(
    cfg: Config,
    sampler: RolloutEngine,
    scorer: GroupScorer | None,
    limits: Limits,
    first: Prompt,
    stack: ExitStack,
    stop: StopAsked,
) -> tuple[RolloutEngine, GroupScorer]:
    """Put an environment between prompts and sampler, where the config names one.

    Args:
        scorer: of the run's reward; None where an environment is all that rewards.
        limits: of the model.
        first: a prompt on which an environment is tried.
        stack: closes what is started here.
    """
    if not cfg.environment.name:
        return sampler, required(scorer, "a reward")
    # A run of single turns pays nothing for those of several.
    from oxrl.recipes.environment import play_episodes

    return play_episodes(cfg, sampler, scorer, limits, first, stack, stop)


def episode_features(cfg: Config) -> list[Feature]:
    """What the training loop does beside its row where an environment answers."""
    if not cfg.environment.name:
        return []
    from oxrl.recipes.features.episodes import Episodes

    return [Episodes()]
