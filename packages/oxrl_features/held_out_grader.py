"""Does the reward still mean what it should? The same held-out answers by it and by another grader.

What the reward of the run says more than the other one is a gap. A gap that widens while the other
grader finds nothing better is what a hacked reward looks like: see the sign `hacked-reward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from oxrl.data.rows import read_rows
from oxrl.errors import ConfigError, DataError, OxrlError, counted, required
from oxrl.recipes.features.base import AnswersAt, FeatureInputs, Planned
from oxrl.types import Group, Metrics, Rollouts, Score
from oxrl_features.numbers import Driving, count, file, problem
from oxrl_stats.intervals import FEWEST
from oxrl_stats.paired import difference

NAME = "held-out-grader"
ROWS = "of prompts that are not trained on, with the columns of data.eval"


class HeldOutGrader(Driving):
    """See the module.

    Args:
        given: what the run is made of.
        data: file of held-out prompts.
        grader: another reward, by what `reward.name` may be.
        every: optimizer steps between two probes; the first one is made after the first step.
    """

    stays = ("_score", "_answers")

    def __init__(
        self, given: FeatureInputs, data: str = "", grader: str = "", every: int = 20
    ) -> None:
        self.every = count(NAME, "every", every, 1)
        self.data = file(NAME, "data", data, ROWS)
        self.grader = grader
        self._score = required(given.score, "rewards of other names")
        self._answers: AnswersAt | None = None
        if not isinstance(grader, str) or not grader:
            text = "is missing: give another reward than that of the run, as in reward.name"
            raise problem(NAME, "grader", text)
        try:
            self._score(grader, [])
        except OxrlError as error:
            if error.exit_code != ConfigError.exit_code:
                raise
            raise problem(NAME, "grader", str(error)) from error

    @classmethod
    def planned(cls, run: Planned, numbers: Mapping[str, object]) -> str:
        """Say how often it asks, and how many responses that takes."""
        every = numbers.get("every", 20)
        data = numbers.get("data", "")
        if not isinstance(every, int) or every < 1 or not isinstance(data, str):
            return ""
        prompts = sum(1 for _ in read_rows(file(NAME, "data", data, ROWS)))
        probes = 1 + sum(
            1
            for step in range(2 * run.updates, run.steps + 1, run.updates)
            if is_due(every, step - run.updates, step)
        )
        responses = probes * prompts * run.samples
        asked = f"{counted(probes, 'probe')} x {counted(prompts, 'prompt')} x "
        return f"{asked}{counted(run.samples, 'sample')} = {counted(responses, 'response')} more"

    def on_assembled(self, answers: Callable[[str], AnswersAt]) -> None:
        """Open the held-out prompts."""
        try:
            self._answers = answers(self.data)
        except DataError as error:
            raise problem(NAME, "data", f"give a file {ROWS}: {error}") from error

    def measure(self, before: int, step: int) -> Metrics:
        """Have the prompts answered by the policy of `step` where it is time, and judge twice."""
        if not is_due(self.every, before, step):
            return {}
        rollouts = required(self._answers, "answers")(step)
        groups = in_groups(rollouts)
        scored = self._score(self.grader, [group.asked for group in groups])
        judged = [judge(group.scores, scores) for group, scores in zip(groups, scored, strict=True)]
        told = [found for found in judged if found is not None]
        if len(told) < FEWEST:
            raise problem(NAME, "data", self._too_few(len(told), scored))
        gap = difference(np.array([one.reward - one.grader for one in told]))
        lengths = [rollout.completion.sampled for rollout in rollouts]
        return {
            "monitor/reward": math.fsum(one.reward for one in told) / len(told),
            "monitor/grader": math.fsum(one.grader for one in told) / len(told),
            "monitor/gap": gap.value,
            "monitor/gap_low": gap.low,
            "monitor/gap_high": gap.high,
            "monitor/prompts": float(len(told)),
            "monitor/length_mean": sum(lengths) / len(lengths),
        }

    def _too_few(self, judged: int, scored: Sequence[Sequence[Score]]) -> str:
        """Say what is to be done where not enough prompts have both scores."""
        text = (
            f"only {counted(judged, 'prompt')} of {len(scored)} could be judged by reward and "
            f"grader, and an interval takes {FEWEST}"
        )
        failed = [score for scores in scored for score in scores if score.status != "ok"]
        if not failed:
            return f"{text}: give a file {ROWS}"
        said = f"grader={self.grader} says {failed[0].status}: {failed[0].reason}"
        return f"{text}; {said}. Give a file {ROWS} that it can read, or another grader"


class Judged(NamedTuple):
    """The mean worth of a prompt's answers, by the reward of the run and by the grader."""

    reward: float
    grader: float


class Answered(NamedTuple):
    """The answers to a prompt, and the scores that the reward of the run gave them."""

    asked: Group
    scores: Sequence[Score]


def is_due(every: int, before: int, step: int) -> bool:
    """True if a probe is to be made after a rollout step.

    Args:
        every: optimizer steps between two probes.
        before, step: optimizer steps done before it, and after it.
    """
    return before == 0 or step // every > before // every


def in_groups(rollouts: Rollouts) -> list[Answered]:
    """Put answers together by their prompt.

    Args:
        rollouts: answers, in any order.

    Returns:
        The prompts in the order in which they came.
    """
    of_prompts: dict[int, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        of_prompts.setdefault(rollout.group_id, []).append(place)
    found: list[Answered] = []
    for places in of_prompts.values():
        own = [rollouts[place] for place in places]
        asked = (own[0].prompt, [rollout.completion for rollout in own])
        found.append(Answered(asked, [rollout.score for rollout in own]))
    return found


def judge(by_reward: Sequence[Score], by_grader: Sequence[Score]) -> Judged | None:
    """Both means of a prompt's answers; None where one of them has no score.

    Args:
        by_reward, by_grader: scores of the same answers.
    """
    rewards = list(values_of(by_reward))
    grades = list(values_of(by_grader))
    if len(rewards) < len(by_reward) or len(grades) < len(by_grader):
        return None
    return Judged(math.fsum(rewards) / len(rewards), math.fsum(grades) / len(grades))


def values_of(scores: Sequence[Score]) -> Iterator[float]:
    """Yield the values of those that have one.

    Args:
        scores: of answers.
    """
    for score in scores:
        if score.value is not None:
            yield score.value
