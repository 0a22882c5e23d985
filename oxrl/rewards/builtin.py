"""The rewards that a name is enough for: what is known of each, and which options it takes; and the
one of the core, `exact`.

The others are in packages beside the core, whose modules are imported when they are asked for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from oxrl.entry_points import is_ours, own_thing
from oxrl.errors import RewardDefinitionError, did_you_mean, known
from oxrl.modelfiles.folder import VALUE_HEAD_FILE, is_reward_model
from oxrl.tables.user_code import REWARD
from oxrl.types import Completions, GroupScores, Objects, Prompt, Score

# Workers start a tenth faster without what pools wait and log with.
if TYPE_CHECKING:
    from oxrl.rewards.pools import GroupReward, SinglePool

Scorer = Callable[..., Score | float | list[Score]]
# What the chances that the steps are right become: shares of their mean, their sum, or the worst.
StepsRule = Literal["mean", "sum", "worst"]
DEFAULT_STEPS: StepsRule = "mean"
STEPS = "steps"


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward: the function that scores, and what else is known of it.

    Args:
        score: its options are keyword arguments.
        takes: answer: the response and the ground truth; prompt: the prompt and the response;
            group: the prompt and the completions of its group, of which it reads more than the
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
        keeps_time: it ends by itself after the seconds that a response may take, its option
            `total_s`.
        pool: makes a pool of its own to score by. Takes what `reward_pool` does, but the name.
    """

    score: Scorer
    takes: Literal["answer", "prompt", "group"] = "answer"
    inline: bool = False
    tried: bool = True
    passes_on: Callable[..., object] | None = None
    refuse: Callable[[Iterable[str]], None] | None = None
    checks: Mapping[str, Callable[[Any], object]] = field(default_factory=dict)
    together: Callable[..., object] | None = None
    require: Callable[..., None] | None = None
    wait_s: float = 0.0
    keeps_time: bool = False
    pool: Callable[..., SinglePool] | None = None


def find_builtin(name: str) -> BuiltIn | None:
    """Return the row of a reward that oxRL has itself, whose module is imported; None of any other.

    Args:
        name: as of `find_reward`.

    Raises:
        RewardDefinitionError: the package that it is in is not there.
    """
    return own_thing(REWARD, name) if is_ours(REWARD, name) else None


def option_problem(name: str, options: Objects) -> str:
    """Say why a reward cannot be called with some options; empty if it can.

    Args:
        name: as of `find_reward`.
        options: of the config, `reward.options`; empty: none are given.

    Returns:
        A sentence that names the option and what would be right.
    """
    row = find_builtin(name)
    if row is None:
        if is_reward_model(name):
            return model_option_problem(name, options)
        return f"a reward that is built in takes options, {name} is none" if options else ""
    try:
        with_options(name, row, options)
    except ValueError as error:
        return str(error)
    return ""


def inline_reward(name: str, row: BuiltIn, options: Objects) -> GroupReward:
    """A built-in reward that scores where it is called.

    Args:
        name, row, options: as of `with_options`; the row is `inline`.

    Raises:
        RewardDefinitionError: it has no such option, or not with such a value.
    """
    try:
        score: Callable[..., Any] = with_options(name, row, options)
    except ValueError as error:
        raise RewardDefinitionError(f"reward.options: {error}") from error

    def score_group(prompt: Prompt, completions: Completions) -> GroupScores:
        return [score(prompt, completion.text) for completion in completions]

    return score_group


def with_options(name: str, row: BuiltIn, options: Objects) -> Scorer:
    """A built-in reward with its options.

    Args:
        name: of the reward, for errors.
        row: of the same.
        options: keyword arguments of its own, as `reward.options` has them.

    Returns:
        The function, which takes a prompt and a completion, or the group's completions, by
        position.

    Raises:
        ValueError: it has no such option, or not with such a value; says which it has.
    """
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
    score = functools.partial(row.score, **options)
    if row.takes != "answer":
        return score
    return lambda prompt, text: score(text, prompt.answer)


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


# --- Options of a reward model.
def model_option_problem(name: str, options: Objects) -> str:
    """Say why a reward model cannot take some options; empty if it can.

    Args:
        name: its folder.
        options: of the config, `reward.options`.

    Returns:
        What is wrong, and what is right.
    """
    unknown = sorted(set(options) - {STEPS})
    if unknown:
        return f"a reward model takes only {STEPS}, and no {unknown[0]}"
    if STEPS not in options:
        return ""
    rule = options[STEPS]
    try:
        known(str(rule), get_args(StepsRule))
    except ValueError as error:
        return f"{STEPS} {error}"
    if kind_of(Path(name)) != "process":
        return f"{STEPS} is of a process reward model, which judges steps; {name} judges the whole"
    return ""


def steps_rule(options: Objects) -> StepsRule:
    """Return the score that a process reward model makes of its steps.

    Args:
        options: of the config, which `model_option_problem` finds right.
    """
    return cast(StepsRule, options.get(STEPS, DEFAULT_STEPS))


def kind_of(folder: Path) -> str:
    """Return what the head of a reward model judges.

    Args:
        folder: of the reward model.

    Returns:
        "process" if it judges steps, else what its file says; empty where that cannot be read,
        which loading the model will say.
    """
    # Only of a model with options: it imports numpy.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / VALUE_HEAD_FILE, framework="numpy") as file:
            return (file.metadata() or {}).get("kind", "")
    except (OSError, SafetensorError):
        return ""


def exact_reward(response: str, answer: object) -> Score:
    """Score 1 if `response` equals `answer` but for white space at both ends, else 0.

    Args:
        response: the text that the model wrote.
        answer: the ground truth, a string or an integer.

    Returns:
        Value 1.0, or 0.0 with a reason; status "invalid" if `answer` is of another type.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        reason = f"exact needs a string or integer answer, got {repr(answer)[:80]}"
        return Score(value=None, status="invalid", reason=reason)
    expected = str(answer).strip()
    given = response.strip()
    if given == expected:
        return Score(value=1.0)
    return Score(value=0.0, reason=f"read {given[:80]!r}, expected {expected[:80]!r}")


# A comparison in linear time, which cannot hang.
EXACT = BuiltIn(exact_reward, inline=True)
