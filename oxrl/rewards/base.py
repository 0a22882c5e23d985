"""What a reward is, and how one is found by name and checked before a run depends on it.

A reward is `reward(prompt, completions) -> list[Score]`, sync or async, over the completions of one
prompt. Users need not write that: `reward.name: my_reward.py:score` may also name a function of one
sample,

    def score(prompt: Prompt, completion: str) -> float:      # prompt.answer is the ground truth
        return 1.0 if completion.strip() == prompt.answer else 0.0

What a function gets is told by the names of its parameters (`signatures.py`): `completion` is one
text, `completions` are those of the group, and rewards written for verl or TRL are called as these
libraries would. A float, an int, a bool, a scalar tensor or a `Score` may be returned, which also
says what it is made of and which steps of the text earned it. A failure is never the number 0: an
exception becomes status "error", a value that is no finite number status "invalid", each with a
reason.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, cast

from oxrl.errors import RewardDefinitionError
from oxrl.rewards.builtin import BUILTINS, find_builtin, with_options
from oxrl.rewards.model_options import (
    DEFAULT_STEPS,
    STEPS,
    StepsRule,
    is_model,
    model_option_problem,
)
from oxrl.runs.waiting import Patience
from oxrl.types import (
    Completions,
    Group,
    GroupScores,
    Names,
    Objects,
    Prompt,
    Score,
    Scores,
    ScoreStatus,
)
from oxrl.usercode.given import given, is_given
from oxrl.usercode.user_code import (
    MOST_REASON,
    capped,
    raised_as,
    run_module,
    split_place,
    text_of,
)

if TYPE_CHECKING:
    from oxrl.usercode.signatures import RewardFunction

# Of `oxrl.train`: what a function is given by.
ARGUMENT = "reward"


class Reward(Protocol):
    """What every reward is to the rest of oxRL: scores for the completions of one prompt."""

    def __call__(
        self, prompt: Prompt, completions: Completions
    ) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        """Score the completions of one prompt; may be async.

        Args:
            prompt: what was asked, with the ground truth.
            completions: of that prompt, at least one.

        Returns:
            One score for each completion, in their order.
        """
        ...


class GroupScorer(Protocol):
    """What scores completions: the pool of a reward's workers, or what stands before it."""

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """Score the completions of every group, in their order.

        Raises:
            DeadlineError: no score came for too long.
            Stopped: a signal asked to stop.
        """
        ...


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
        value = self.function(prompt, given)
        if not inspect.isawaitable(value):
            return value

        async def wait() -> object:
            return await value

        return _run_async(wait())

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
        def failed(status: ScoreStatus, samples: str, problem: str) -> Score:
            reason = f"{self.name}, {samples} of prompt {prompt.uid}: {problem}"
            return Score(value=None, status=status, reason=capped(reason, MOST_REASON))

        samples = sample_range(first, count)
        try:
            values: Any = self.call(prompt, given)
        except Exception as error:  # noqa: BLE001 - whatever user code raises is the result
            raised = f"raised {type(error).__name__}: {text_of(error)}"
            return [failed("error", samples, raised)] * count
        problem = self.problem(values, count)
        if problem:
            return [failed("invalid", samples, problem)] * count
        if self.per_sample:
            values = [values]
        scores: GroupScores = []
        for index, value in enumerate(values, start=first):
            try:
                scores.append(_to_score(value))
            except ValueError as error:
                scores.append(failed("invalid", sample_range(index, 1), f"returned {error}"))
        return scores


def _run_async(wait: Coroutine[Any, Any, object]) -> object:
    """Wait for what is async; in a thread of its own where a loop runs, as in a notebook."""
    import asyncio  # a third of this module's import time

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, wait).result()


def sample_range(first: int, count: int) -> str:
    """Name samples of a group, as reasons do.

    Args:
        first: index in the group of the first of them.
        count: how many.

    Returns:
        "sample 3" or "samples 3 to 5".
    """
    return f"sample {first}" if count == 1 else f"samples {first} to {first + count - 1}"


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
    reason = capped(score.reason, MOST_REASON)
    return dataclasses.replace(score, value=number, parts=parts, reason=reason, steps=steps)


def find_reward(name: str, options: Objects | None = None) -> LoadedReward:
    """Find a reward and run the file that defines it, but not the reward itself.

    Args:
        name: a key of BUILTINS, "path.py:function", a reward model's folder, or the name of a
            function that Python gives.
        options: keyword arguments of a built-in reward, or of a reward model.

    Returns:
        The reward, ready to score.

    Raises:
        RewardDefinitionError: nothing loadable under that name; says what to change.
    """
    options = options or {}
    problem = option_problem(name, options)
    if problem:
        raise RewardDefinitionError(f"reward.options: {problem}")
    if name in BUILTINS:
        row = find_builtin(name)
        if row.require is not None:
            row.require(**options)
        return LoadedReward(name, with_options(name, options), per_sample=not row.of_groups)
    from oxrl.usercode.signatures import form_of  # of users' functions alone

    path, function_name = locate(name)
    if is_given(name):
        form = form_of(name, given(name, ARGUMENT))
        return LoadedReward(name, form.call, form.per_sample, form.columns)
    if path.is_dir():
        from oxrl.rewards.reward_model import scorer  # torch, which other rewards do without

        steps = cast(StepsRule, options.get(STEPS, DEFAULT_STEPS))
        return LoadedReward(name, scorer(path, steps), per_sample=False)
    module = _run_module(path, name)
    form = form_of(name, getattr(module, function_name, None))
    return LoadedReward(name, form.call, form.per_sample, form.columns, path, module)


def option_problem(name: str, options: Objects) -> str:
    """Say why a reward cannot be called with some options; empty if it can.

    Args:
        name: as of `find_reward`.
        options: of the config, `reward.options`; empty: none are given.

    Returns:
        A sentence that names the option and what would be right.
    """
    if name not in BUILTINS:
        if is_model(name):
            return model_option_problem(name, options)
        known = f"a reward that is built in takes options, {name} is none"
        return known if options else ""
    try:
        with_options(name, options)
    except ValueError as error:
        return str(error)
    return ""


def locate(name: str) -> tuple[Path, str]:
    """Say where a reward is, without running anything.

    Args:
        name: as of `find_reward`.

    Returns:
        The file or folder, and the function's name: empty of a built-in, of a reward model and of
            what Python gives.

    Raises:
        RewardDefinitionError: neither a built-in name nor of that form, or the file is not there,
            no Python, or surely without such a function.
    """
    if name in BUILTINS or is_model(name):
        return Path(name).resolve(), ""
    forms = "path.py:function (such as my_reward.py:score) or a reward model's folder"
    try:
        if is_given(name):
            given(name, ARGUMENT)
            return Path(name), ""
        return split_place(name, f"{', '.join(BUILTINS)}, {forms}", BUILTINS)
    except ValueError as error:
        raise RewardDefinitionError(f"reward.name={name}: {error}") from error


def _run_module(path: Path, name: str) -> ModuleType:
    try:
        return run_module(path, "reward")
    except (Exception, SystemExit) as error:
        raised = f"running {path} raised {raised_as(error, path)}"
        raise RewardDefinitionError(f"reward.name={name}: {raised}") from error


def _show(value: object) -> str:
    try:
        shown = repr(value)
    except Exception as error:  # noqa: BLE001 - `__repr__` is the user's
        shown = f"a value whose repr raises {type(error).__name__}"
    return f"{capped(shown, 80)} ({type(value).__name__})"
