"""What answers prompts and what scores the answers: in one turn, or in episodes of several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from oxrl.assembly.assembly import Limits
from oxrl.config import Config
from oxrl.engines.sample.base import RolloutEngine
from oxrl.errors import InvariantError, required
from oxrl.rewards.base import GroupScorer
from oxrl.runs.waiting import Patience, StopAsked
from oxrl.tables.user_code import REWARD
from oxrl.types import Group, Prompt, Scores
from oxrl.usercode.locate import is_ours

if TYPE_CHECKING:
    from oxrl.recipes.features.base import Feature
    from oxrl.recipes.features.reward_scale import RewardScale


class NoScores:
    """The scorer of a run that scores nothing."""

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """See GroupScorer.

        Raises:
            InvariantError: something is scored all the same.
        """
        raise InvariantError("rollout.from_samples without data.eval has nothing scored")


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
        scorer: of the run's reward; None where an environment is all that rewards, or nothing is
            scored.
        limits: of the model.
        first: a prompt on which an environment is tried.
        stack: closes what is started here.
    """
    if cfg.scores_nothing:
        return sampler, NoScores()
    if not cfg.environment.name:
        return sampler, required(scorer, "a reward")
    # A run of single turns pays nothing for those of several.
    from oxrl.assembly.episode_wiring import play_episodes

    return play_episodes(cfg, sampler, scorer, limits, first, stack, stop)


def episode_features(cfg: Config) -> list[Feature]:
    """What the training loop does beside its row where an environment answers."""
    if not cfg.environment.name:
        return []
    from oxrl.recipes.features.episodes import Episodes

    return [Episodes()]


def reward_scale(cfg: Config) -> list[RewardScale]:
    """What puts rewards on one scale, where the config asks for it."""
    if cfg.reward.normalize == "none" and cfg.reward.bound is None:
        return []
    from oxrl.recipes.features.reward_scale import RewardScale

    return [RewardScale(cfg.reward.normalize, cfg.reward.bound)]


def placed_steps(
    cfg: Config, scorer: GroupScorer | None, tokenizer: PreTrainedTokenizerBase
) -> GroupScorer | None:
    """The scorer, and where in tokens the steps end that it rewards; most rewards have none."""
    if scorer is None or all(is_ours(REWARD, name) for name in cfg.reward.names):
        return scorer
    from oxrl.rewards.step_rewards import StepScorer

    return StepScorer(scorer, tokenizer)
