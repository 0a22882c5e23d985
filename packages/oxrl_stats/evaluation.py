"""Figures of an evaluation and how sure they are: pass@k, best@k, and votes of its responses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oxrl.functional.shaping import best_at_k, pass_at_k
from oxrl.recipes.scored_answers import in_groups
from oxrl.types import Rollout
from oxrl_stats.intervals import (
    Interval,
    Numbers,
    advice,
    all_scored,
    bootstrap_intervals,
)


class Answers(NamedTuple):
    """The responses of an evaluation: their worth, and what can be voted on.

    rewards: [prompts, samples]. said: as many answers; equal ones are equal texts.
    """

    rewards: Numbers
    said: Sequence[Sequence[str]]


def answers_of(rollouts: Sequence[Rollout], *, samples: int) -> Answers:
    """The answers of an evaluation, without the prompts of which a response has no score.

    Args:
        rollouts: `samples` in a row per prompt.
        samples: of a prompt.
    """
    groups = in_groups(rollouts, samples)
    rewards = rewards_of(groups, samples=samples)
    whole = all_scored(rewards)
    said = [
        [answer_of(rollout) for rollout in group]
        for group, is_whole in zip(groups, whole, strict=True)
        if is_whole
    ]
    return Answers(rewards[whole], said)


def rewards_of(groups: Sequence[Sequence[Rollout]], *, samples: int) -> Numbers:
    """The rewards of the responses to each prompt.

    Args:
        groups: `samples` responses to each prompt.
        samples: of a prompt.

    Returns:
        [prompts, samples], NaN where a response has no score.
    """
    values = [[rollout.score.value for rollout in group] for group in groups]
    return np.array(values, dtype=float).reshape(-1, samples)


def answer_of(rollout: Rollout) -> str:
    """The answer of a response, as its reward read it; without that its text.

    Args:
        rollout: with the response.
    """
    if rollout.score.answer is not None:
        return rollout.score.answer
    return rollout.completion.text.strip()


def majority_at_k(answers: Answers, *, k: int) -> Numbers:
    """The reward of the answer that most of `k` responses give, of every prompt: [prompts].

    The responses are taken `k` at a time, in the order in which they were drawn, and what is left
    over is not counted. Of answers that are as frequent, the first one given wins.

    Args:
        answers: of an evaluation.
        k: responses that vote.

    Source:
        Wang et al., arXiv:2203.11171, section 2.
    """
    found: list[float] = []
    for rewards, said in zip(answers.rewards, answers.said, strict=True):
        chosen: list[float] = []
        for start in range(0, len(said) - k + 1, k):
            votes = Counter(said[start : start + k])
            [(winner, _)] = votes.most_common(1)  # of equal counts the first
            chosen.append(float(rewards[start + said[start : start + k].index(winner)]))
        found.append(sum(chosen) / len(chosen))
    return np.array(found)


def figures_at_k(answers: Answers) -> dict[str, Interval]:
    """pass@k, best@k and maj@k for k = 1, 2, 4 ..., with their intervals over prompts.

    Args:
        answers: of an evaluation; without a prompt there is no figure.
    """
    prompts, samples = answers.rewards.shape
    if not prompts:
        return {}
    rewards = torch.from_numpy(answers.rewards)
    total = torch.full((prompts,), samples)
    correct = (rewards > 0.5).sum(1)
    of_prompts: dict[str, Numbers] = {}
    k = 1
    while k <= samples:
        of_prompts[f"pass@{k}"] = pass_at_k(total, correct, k=k).double().numpy()
        of_prompts[f"best@{k}"] = best_at_k(rewards, k=k).double().numpy()
        of_prompts[f"maj@{k}"] = majority_at_k(answers, k=k)
        k *= 2
    intervals = bootstrap_intervals(np.stack(list(of_prompts.values()), axis=1))
    return dict(zip(of_prompts, intervals, strict=True))


def evaluation_bounds(rollouts: Sequence[Rollout], samples: int) -> Mapping[str, float]:
    """The metrics that `oxrl eval` adds to the means: figures at k, and their intervals.

    Args:
        rollouts: `samples` in a row per prompt.
        samples: of a prompt.

    Returns:
        `eval/pass@4`, `eval/pass@4_low`, `eval/pass@4_high` and so on; without ends where there are
        fewer than 5 prompts.
    """
    metrics: dict[str, float] = {}
    for name, found in figures_at_k(answers_of(rollouts, samples=samples)).items():
        metrics[f"eval/{name}"] = found.value
        if not math.isnan(found.low):
            metrics[f"eval/{name}_low"] = found.low
            metrics[f"eval/{name}_high"] = found.high
    return metrics


def evaluation_advice(rollouts: Sequence[Rollout], samples: int) -> str:
    """One sentence: how wide the interval of the mean reward is, and what would make it narrower.

    Args:
        rollouts: `samples` in a row per prompt.
        samples: of a prompt.
    """
    return advice(answers_of(rollouts, samples=samples).rewards)
