"""Scores of responses that a reward could not judge, with reasons that say whose they are."""

from __future__ import annotations

from collections.abc import Sequence

from oxrl.types import Group, GroupScores, Prompt, Score, ScoreStatus
from oxrl.usercode.user_code import MOST_REASON, capped


def told_samples(prompt: Prompt, samples: range) -> str:
    """Name samples of a prompt, as reasons do.

    Args:
        prompt: that was answered.
        samples: their indices in its group, at least one.

    Returns:
        "sample 3 of prompt p" or "samples 3 to 5 of prompt p".
    """
    last = samples.stop - 1
    place = f" {last}" if len(samples) == 1 else f"s {samples.start} to {last}"
    return f"sample{place} of prompt {prompt.uid}"


def failed_scores(
    name: str, prompt: Prompt, samples: range, status: ScoreStatus, why: str
) -> GroupScores:
    """The scores of responses that a reward could not judge.

    Args:
        name: of the reward.
        prompt: that was answered.
        samples: of its group that fared so.
        status: what became of them.
        why: in words.
    """
    reason = capped(f"{name}, {told_samples(prompt, samples)}: {why}", MOST_REASON)
    return [Score(value=None, status=status, reason=reason)] * len(samples)


def failed_group(name: str, group: Group, status: ScoreStatus, why: str) -> GroupScores:
    """The scores of a group none of which could be judged.

    Args:
        name: of the reward.
        group: the prompt and its responses.
        status: what became of them.
        why: in words.
    """
    return failed_scores(name, group[0], range(len(group[1])), status, why)


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
            one = range(place, place + 1)
            found += failed_scores(name, group[0], one, score.status, score.reason)
        else:
            found.append(score)
    return found
