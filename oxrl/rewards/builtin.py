"""The rewards that a name is enough for: where each is, and which options it takes.

The module of a reward is imported when the reward is asked for, and no sooner.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from oxrl.errors import RewardDefinitionError, did_you_mean
from oxrl.rewards.model_options import is_model, model_option_problem
from oxrl.tables.user_code import REWARD
from oxrl.types import Completions, GroupScores, Objects, Prompt, Score
from oxrl.usercode.locate import Place, is_ours, locate, place_of

Scorer = Callable[..., Score | float | list[Score]]
GroupReward = Callable[[Prompt, Completions], GroupScores]


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward: the function that scores, and what else is known of it.

    Args:
        score: takes a prompt and a text, or where `of_groups` the completions of the group; its
            options are keyword arguments.
        of_groups: it scores the completions of a group together: it reads more of them than the
            text.
        inline: it cannot hang and never raises, and gives a `Score` of every text, so it runs in
            the caller's process.
        tried: it is called before a run depends on it.
        passes_on: gets the options that `score` does not name itself.
        refuse: is shown the names of all options first; raises ValueError.
        checks: of options that more than a type can be wrong with; raise ValueError.
        together: takes all options together, and raises ValueError where they cannot work.
        require: looks for what has to be there before the first sample. Takes the options, raises
            RewardDefinitionError.
        wait_s: seconds that a response may take beyond those that its options allow.
    """

    score: Scorer
    of_groups: bool = False
    inline: bool = False
    tried: bool = True
    passes_on: Callable[..., object] | None = None
    refuse: Callable[[Iterable[str]], None] | None = None
    checks: Mapping[str, Callable[[Any], object]] = field(default_factory=dict)
    together: Callable[..., object] | None = None
    require: Callable[..., None] | None = None
    wait_s: float = 0.0


def find_builtin(name: str) -> BuiltIn:
    """The row of a built-in reward; imports its module.

    Args:
        name: of a reward that oxRL has itself.
    """
    place = locate(REWARD, name)
    return getattr(import_module(place.module), place.name)


def place_of_reward(name: str) -> Place:
    """Say where a reward is, without running anything.

    Args:
        name: as of `find_reward`.

    Raises:
        ValueError: as of `place_of`.
    """
    return Place(Path(name).resolve()) if is_model(name) else place_of(REWARD, name)


def option_problem(name: str, options: Objects) -> str:
    """Say why a reward cannot be called with some options; empty if it can.

    Args:
        name: as of `find_reward`.
        options: of the config, `reward.options`; empty: none are given.

    Returns:
        A sentence that names the option and what would be right.
    """
    if is_model(name):
        return model_option_problem(name, options)
    if not is_ours(REWARD, name):
        known = f"a reward that is built in takes options, {name} is none"
        return known if options else ""
    try:
        with_options(name, options)
    except ValueError as error:
        return str(error)
    return ""


def inline_reward(name: str, options: Objects | None) -> GroupReward:
    """A built-in reward that scores where it is called.

    Args:
        name: of a row that is `inline`.
        options: as of `with_options`.

    Raises:
        RewardDefinitionError: it has no such option, or not with such a value.
    """
    problem = option_problem(name, options or {})
    if problem:
        raise RewardDefinitionError(f"reward.options: {problem}")
    score = cast(Callable[[Prompt, str], Score], with_options(name, options or {}))

    def score_group(prompt: Prompt, completions: Completions) -> GroupScores:
        return [score(prompt, completion.text) for completion in completions]

    return score_group


def with_options(name: str, options: Objects) -> Scorer:
    """A built-in reward with its options.

    Args:
        name: of a reward that oxRL has itself.
        options: keyword arguments of its own, as `reward.options` has them.

    Returns:
        The function, which takes a prompt and a completion, or the group's completions, by
        position.

    Raises:
        ValueError: it has no such option, or not with such a value; says which it has.
    """
    row = find_builtin(name)
    if row.refuse is not None:
        row.refuse(options)
    accepted = {} if row.passes_on is None else _keywords(row.passes_on)
    accepted |= _keywords(row.score)
    for option, value in options.items():
        if option not in accepted:
            listed = ", ".join(accepted) or "none"
            hint = did_you_mean(option, accepted)
            raise ValueError(f"{name} has no option {option!r}; it has {listed}{hint}")
        problem = _option_problem(row, option, value, accepted[option].default)
        if problem:
            raise ValueError(f"{name}: {option} {problem}")
    if row.together is not None:
        row.together(**options)
    return functools.partial(row.score, **options)


def _keywords(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The parameters of a function that are passed by name alone."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _option_problem(row: BuiltIn, option: str, value: object, default: object) -> str:
    """Say why an option cannot have a value; empty if it can."""
    kind = type(default)
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if isinstance(value, bool) and kind is not bool:
        fits = False
    if default is not inspect.Parameter.empty and not fits:
        return f"must be of type {kind.__name__}, got {value!r}"
    try:
        row.checks.get(option, str)(value)
    except ValueError as error:
        return str(error)
    return ""
