"""The worth of an episode: the rewards of its turns, and the score by the run's reward; and the
metric that counts its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from oxrl.rewards.pools import GroupScorer
from oxrl.runs.waiting import Patience
from oxrl.types import ENVIRONMENT, Completion, EpisodeEnd, Group, Score, Scores

TURNS = "episode/turns"


class EpisodeScorer:
    """A GroupScorer that adds the rewards of turns to another scorer's.

    Args:
        scorer: of the run's reward; None: the environment's rewards are all there is.
    """

    def __init__(self, scorer: GroupScorer | None) -> None:
        self._scorer = scorer

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """See GroupScorer. An episode whose environment failed has no score, whatever else."""
        own = [[of_turns(completion) for completion in completions] for _, completions in groups]
        if self._scorer is None:
            return own
        judged = self._scorer.score(groups, patience)
        pairs = zip(own, judged, strict=True)
        return [list(map(both, by_turns, by_reward)) for by_turns, by_reward in pairs]


def counter(end: str) -> str:
    """The metric that counts episodes of this end."""
    return f"episode/{end}"


def nothing_counted() -> defaultdict[str, float]:
    """The metrics of no episode at all: every end, and their turns."""
    return defaultdict(float, dict.fromkeys([TURNS, *map(counter, get_args(EpisodeEnd))], 0.0))


def of_turns(completion: Completion) -> Score:
    """The sum of the rewards of an episode's turns."""
    if completion.end in ("timeout", "environment_error"):
        status = "timeout" if completion.end == "timeout" else "error"
        return Score(value=None, status=status, reason=completion.reason)
    return Score(value=sum(turn.reward for turn in completion.turns))


def both(by_turns: Score, by_reward: Score) -> Score:
    """The sum of two scores of one episode; a failure of either is one of both."""
    if by_turns.value is None:
        return by_turns
    if by_reward.value is None:
        return by_reward
    parts = {**by_reward.parts, ENVIRONMENT: by_turns.value}
    value = by_turns.value + by_reward.value
    return replace(by_reward, value=value, parts=parts)
