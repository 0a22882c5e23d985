"""Does the reward still mean what it should? The same held-out answers by it and by another grader.

What the reward of the run says more than the other one is a gap. A gap that widens while the other
grader finds nothing better is what a hacked reward looks like: see the sign `hacked-reward`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from oxrl.errors import ConfigError, OxrlError, counted, required
from oxrl.recipes.features.base import AnswersAt, FeatureInputs, Planned
from oxrl.types import Metrics, Rollouts, Score
from oxrl_features.numbers import Checked, count, opened, problem
from oxrl_stats.intervals import FEWEST
from oxrl_stats.paired import difference

NAME = "held-out-grader"
ROWS = "of prompts that are not trained on, with the columns of data.eval"


class HeldOutGrader(Checked):
    """See the module.

    Args:
        given: what the run is made of.
        data: file of held-out prompts.
        grader: another reward, by what `reward.name` may be.
        every: optimizer steps between two probes; the first one is made after the first step.
        pattern: a regular expression; the share of the answers in which it is found is told.
    """

    stays = ("_score", "_answers")

    def __init__(
        self,
        given: FeatureInputs,
        data: str = "",
        grader: str = "",
        every: int = 20,
        pattern: str = "",
    ) -> None:
        self.every = count(NAME, "every", every, 1)
        self.data = data
        self.grader = grader
        self.pattern = expression(pattern)
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
    def planned(cls, run: Planned, numbers: Mapping[str, Any]) -> str:
        """Say how often it asks, and how many responses that takes."""
        made = cls(run.given, **numbers)
        prompts = opened(NAME, "data", made.data, ROWS, run.prompts)
        if prompts < FEWEST:
            asked = f"{counted(prompts, 'prompt')} of {made.data} may be asked (data.eval_rows)"
            raise problem(
                NAME, "data", f"{asked}, and an interval takes {FEWEST}: give a file {ROWS}"
            )
        ends = range(run.updates, run.steps + 1, run.updates)
        probes = sum(is_due(made.every, end - run.updates, end) for end in ends)
        responses = probes * prompts * run.samples
        asked = f"{counted(probes, 'probe')} x {counted(prompts, 'prompt')} x "
        return f"{asked}{counted(run.samples, 'sample')} = {counted(responses, 'response')} more"

    def on_assembled(self, answers: Callable[[str], AnswersAt]) -> None:
        """Open the held-out prompts."""
        self._answers = opened(NAME, "data", self.data, ROWS, answers)

    def measure(self, before: int, step: int) -> Metrics:
        """Have the prompts answered by the policy of `step` where it is time, and judge twice."""
        if not is_due(self.every, before, step):
            return {}
        rollouts = required(self._answers, "answers")(step)
        of_prompts = [list(own) for _, own in groupby(rollouts, key=attrgetter("group_id"))]
        asked = [(own[0].prompt, [one.completion for one in own]) for own in of_prompts]
        graded = self._score(self.grader, asked)
        rewards = worth([one.score for one in own] for own in of_prompts)
        grades = worth(graded)
        judged = np.isfinite(rewards) & np.isfinite(grades)
        if judged.sum() < FEWEST:
            raise problem(NAME, "data", self._too_few(int(judged.sum()), graded))
        gap = difference((rewards - grades)[judged])
        metrics = {
            "monitor/reward": float(rewards[judged].mean()),
            "monitor/grader": float(grades[judged].mean()),
            "monitor/gap": gap.value,
            "monitor/gap_low": gap.low,
            "monitor/gap_high": gap.high,
            "monitor/prompts": float(judged.sum()),
        }
        return metrics | self._about(rollouts)

    def _about(self, rollouts: Rollouts) -> Metrics:
        """Describe the answers themselves."""
        lengths = [one.completion.sampled for one in rollouts]
        told = {"monitor/length_mean": float(np.mean(lengths))}
        if self.pattern.pattern:
            found = [self.pattern.search(one.completion.text) is not None for one in rollouts]
            told["monitor/pattern_frac"] = float(np.mean(found))
        return told

    def _too_few(self, judged: int, graded: Sequence[Sequence[Score]]) -> str:
        """Say what is to be done where not enough prompts have both scores."""
        text = (
            f"only {counted(judged, 'prompt')} of {len(graded)} could be judged by reward and "
            f"grader, and an interval takes {FEWEST}"
        )
        failed = [score for scores in graded for score in scores if score.status != "ok"]
        if not failed:
            return f"{text}: give a file {ROWS}"
        said = f"grader={self.grader} says {failed[0].status}: {failed[0].reason}"
        return f"{text}; {said}. Give a file {ROWS} that it can read, or another grader"


def expression(pattern: str) -> re.Pattern[str]:
    """A regular expression.

    Args:
        pattern: as it stands in `train.features`.

    Raises:
        ConfigError: it is none.
    """
    wanted = r"write one of Python's, in single quotes, as in '\d+', or leave it out"
    if not isinstance(pattern, str):
        raise problem(NAME, "pattern", f"{pattern!r} is no regular expression: {wanted}")
    try:
        return re.compile(pattern)
    except re.error as error:
        text = f"{pattern!r} is no regular expression, {error}: {wanted}"
        raise problem(NAME, "pattern", text) from error


def is_due(every: int, before: int, step: int) -> bool:
    """True if a probe is to be made after a rollout step.

    Args:
        every: optimizer steps between two probes.
        before, step: optimizer steps done before it, and after it.
    """
    return before == 0 or step // every > before // every


def worth(scores: Iterable[Sequence[Score]]) -> np.ndarray:
    """The mean score of each prompt's answers.

    Args:
        scores: of the answers to each prompt.

    Returns:
        [prompts] float64; NaN where an answer has no score.
    """
    return np.array([np.mean(np.array([one.value for one in own], float)) for own in scores])
