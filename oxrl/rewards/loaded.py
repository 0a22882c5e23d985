"""A reward that was found: its function, called so that whatever it does becomes a score.

A failure is never the number 0: an exception becomes status "error", a value that is no finite
number status "invalid", each with a reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat

from oxrl.errors import RewardDefinitionError
from oxrl.modelfiles.folder import is_reward_model
from oxrl.models.lazy_transformers import import_model_classes
from oxrl.rewards.builtin import find_builtin, option_problem, steps_rule, with_options
from oxrl.rewards.call_forms import RewardFunction, form_of
from oxrl.rewards.failures import failed_scores
from oxrl.tables.user_code import REWARD
from oxrl.types import Completions, GroupScores, Names, Objects, Prompt, Score
from oxrl.usercode.find import find
from oxrl.usercode.user_code import MOST_REASON, awaited, capped, text_of


@dataclasses.dataclass(frozen=True)
class LoadedReward:
    """A reward function behind the Reward interface: a list of scores, never an exception.

    `columns` are fields of the data that it cannot do without. `path`, `module`: the user's file.
    """

    name: str
    function: RewardFunction
    per_sample: bool
    columns: Names = ()
    path: Path | None = None
    module: ModuleType | None = None

    def __call__(self, prompt: Prompt, completions: Completions, first: int = 0) -> GroupScores:
        """Score completions of one prompt.

        Args:
            prompt: what was asked, with the ground truth.
            completions: a group, or a part of one.
            first: index in its group of the first of `completions`, for the reasons.

        Returns:
            One score per completion, in order.
        """
        if not self.per_sample:
            return self._scores(prompt, completions, first, len(completions))
        scores: GroupScores = []
        for index, completion in enumerate(completions, start=first):
            scores += self._scores(prompt, completion.text, index, 1)
        return scores

    def call(self, prompt: Prompt, given: str | Completions) -> object:
        """Call the user's function as it is written, with one text or with the group.

        Args:
            prompt: what was asked, with the ground truth.
            given: the text of one completion where `per_sample`, else the completions of the group.

        Returns:
            What it returns, awaited if it is async; nothing is checked, and what it raises passes
            through.
        """
        return awaited(self.function(prompt, given))

    def problem(self, value: object, count: int) -> str:
        """Say why `value` is not what the function must return for `count` completions.

        Args:
            value: what the function returned.
            count: completions it was called with; 1 where `per_sample`.

        Returns:
            A reason that goes on after "the function ..."; empty if the value is fine.
        """
        if self.per_sample:
            fine = isinstance(value, Score | SupportsFloat)
            return "" if fine else f"returned {_show(value)}, need a number"
        if isinstance(value, str) or not isinstance(value, Sequence):
            needed = f"a list of {count} Score or numbers, one per completion"
            return f"returned {_show(value)}, need {needed}"
        if len(value) != count:
            return f"returned {len(value)} scores for {count} completions"
        return ""

    def _scores(
        self, prompt: Prompt, given: str | Completions, first: int, count: int
    ) -> GroupScores:
        samples = range(first, first + count)
        try:
            values: Any = self.call(prompt, given)
        except Exception as error:  # noqa: BLE001 - whatever user code raises is the result
            raised = f"raised {type(error).__name__}: {text_of(error)}"
            return failed_scores(self.name, prompt, samples, "error", raised)
        problem = self.problem(values, count)
        if problem:
            return failed_scores(self.name, prompt, samples, "invalid", problem)
        if self.per_sample:
            values = [values]
        scores: GroupScores = []
        for index, value in enumerate(values, start=first):
            try:
                scores.append(_to_score(value))
            except ValueError as error:
                one = range(index, index + 1)
                scores += failed_scores(self.name, prompt, one, "invalid", f"returned {error}")
        return scores


def _to_score(value: object) -> Score:
    score = value if isinstance(value, Score) else Score(value=0.0)
    given = score.value if score is value else value
    if score.value is None:
        return dataclasses.replace(score, reason=capped(score.reason, MOST_REASON))
    if not isinstance(given, SupportsFloat):
        raise ValueError(f"{_show(given)}, need a number")
    try:
        number = float(given)
        parts = {name: float(part) for name, part in score.parts.items()}
        steps = tuple((int(end), float(share)) for end, share in score.steps)
    except Exception as error:  # any: `__float__` and `parts` are the user's, or a library's
        why = text_of(error)
        raise ValueError(f"{_show(value)}, which is no single number: {why}") from error
    if not math.isfinite(number):
        raise ValueError(f"{number}, need a finite number")
    wrong = [step for step in steps if step[0] < 0 or not math.isfinite(step[1])]
    if wrong:
        needed = "a number of characters and a finite number"
        raise ValueError(f"{wrong[0]} in steps, each of which needs {needed}")
    return dataclasses.replace(
        score,
        value=number,
        parts=parts,
        reason=capped(score.reason, MOST_REASON),
        steps=steps,
        answer=None if score.answer is None else capped(score.answer, MOST_REASON),
    )


def find_reward(name: str, options: Objects | None = None) -> LoadedReward:
    """Find a reward and run the file that defines it, but not the reward itself.

    Args:
        name: of a reward of oxRL's, "path.py:function", a reward model's folder, or of what Python
            or an installed package gives.
        options: keyword arguments of a reward of oxRL's, or of a reward model.

    Returns:
        The reward, ready to score.

    Raises:
        RewardDefinitionError: nothing loadable under that name; says what to change.
    """
    options = options or {}
    problem = option_problem(name, options)
    if problem:
        raise RewardDefinitionError(f"reward.options: {problem}")
    row = find_builtin(name)
    if row is not None:
        if row.require is not None:
            row.require(**options)
        return LoadedReward(name, with_options(name, row, options), per_sample=row.takes != "group")
    if is_reward_model(name):
        import_model_classes()  # before anything below imports them
        from oxrl.rewards.reward_model import RewardModel  # torch, which other rewards do without

        return LoadedReward(
            name,
            RewardModel(Path(name).resolve(), steps=steps_rule(options)),
            per_sample=False,
        )
    found = find(REWARD, name)
    form = form_of(name, found.value)
    return LoadedReward(name, form.call, form.per_sample, form.columns, found.file, found.module)


def _show(value: object) -> str:
    try:
        shown = repr(value)
    except Exception as error:  # noqa: BLE001 - `__repr__` is the user's
        shown = f"a value whose repr raises {type(error).__name__}"
    return f"{capped(shown, 80)} ({type(value).__name__})"
