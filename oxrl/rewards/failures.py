"""Scores of responses that a reward could not judge, with reasons that say whose they are."""

from __future__ import annotations

from collections.abc import Sequence

from oxrl.types import Group, GroupScores, Prompt, Score, ScoreStatus
from oxrl.usercode.user_code import MOST_REASON, capped


def sample_range(first: int, count: int) -> str:
    """Name samples of a group, as reasons do.

    Args:
        first: index in the group of the first of them.
        count: how many.

    Returns:
        "sample 3" or "samples 3 to 5".
    """
    return f"sample {first}" if count == 1 else f"samples {first} to {first + count - 1}"


def failed_score(name: str, prompt: Prompt, samples: str, status: ScoreStatus, why: str) -> Score:
    """The score of a response that a reward could not judge.

    Args:
        name: of the reward.
        prompt: that was answered.
        samples: of its group that fared so, as of `sample_range`.
        status: what became of it.
        why: in words.
    """
    reason = capped(f"{name}, {samples} of prompt {prompt.uid}: {why}", MOST_REASON)
    return Score(value=None, status=status, reason=reason)


def failed_group(name: str, group: Group, status: ScoreStatus, why: str) -> GroupScores:
    """The scores of a group none of which could be judged.

    Args:
        name: of the reward.
        group: the prompt and its responses.
        status: what became of them.
        why: in words.
    """
    prompt, completions = group
    count = len(completions)
    return [failed_score(name, prompt, sample_range(0, count), status, why)] * count


def named_failures(name: str, group: Group, scores: Sequence[Score]) -> GroupScores:
    """The scores, the failed ones among them saying whose they are.

    Args:
        name: of the reward.
        group: the prompt and its completions.
        scores: one for each completion, in order.

    Returns:
        As many, in that order; reasons of failures begin with the reward, the sample and the
        prompt.
    """
    found: GroupScores = []
    for place, score in enumerate(scores):
        if score.value is None:
            score = failed_score(name, group[0], sample_range(place, 1), score.status, score.reason)
        found.append(score)
    return found
