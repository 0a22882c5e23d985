"""The rewards that a name is enough for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oxrl.errors import MissingExtraError, did_you_mean, known
from oxrl.rewards.choices import choice_reward
from oxrl.rewards.code import TOTAL_S, judged, require_sandbox, sandbox_of
from oxrl.rewards.formats import (
    THINK_ANSWER,
    compiled,
    cosine_length_value,
    format_reward,
    repetition_reward,
)
from oxrl.rewards.instructions import instructions_reward
from oxrl.rewards.judge.options import JudgeOptions, refuse_secrets
from oxrl.rewards.math import math_reward
from oxrl.rewards.tool_calls import tool_call_reward
from oxrl.types import Completion, Prompt, Score


def exact_reward(response: str, answer: object) -> Score:
    """Score 1 if `response` equals `answer` but for white space at both ends, else 0.

    Args:
        response: the text that the model wrote.
        answer: the ground truth, a string or an integer.

    Returns:
        Value 1.0, or 0.0 with a reason; status "invalid" if `answer` is of another type.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        reason = f"exact needs a string or integer answer, got {answer!r}"
        return Score(value=None, status="invalid", reason=reason)
    expected = str(answer).strip()
    given = response.strip()
    if given == expected:
        return Score(value=1.0)
    return Score(value=0.0, reason=f"read {given[:80]!r}, expected {expected[:80]!r}")


def reasoning_gym_reward(prompt: Prompt, completion: str) -> float:
    """Score what the last `<answer>...</answer>` holds by the task's own verifier.

    Without such a tag everything is the answer. A task may have many right answers, and partial
    credit.

    Args:
        prompt: one that `oxrl prepare reasoning-gym` wrote: the verifier reads the entry that it
            leaves in `metadata["entry"]`.
        completion: the text that the model wrote.

    Returns:
        The verifier's score, in [0, 1].

    Raises:
        MissingExtraError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        install = 'pip install -e ".[tasks]"'
        raise MissingExtraError(f"reasoning-gym is not installed: {install}") from error
    entry = prompt.metadata["entry"]
    # rpartition and partition return the whole text where there is no tag.
    answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    score_answer = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return float(score_answer(answer=answer, entry=entry))


def score_math(prompt: Prompt, text: str) -> Score:
    """`math`: 1 if the final answer is the ground truth as mathematics, else 0; see
    `oxrl.rewards.math`.

    Args:
        prompt: whose `answer` is a number or a text.
        text: the response.

    Returns:
        As of `math_reward`.
    """
    return math_reward(text, prompt.answer)


def score_exact(prompt: Prompt, text: str) -> Score:
    """`exact`: 1 if the response is the ground truth, letter by letter, else 0; see `exact_reward`.

    Args:
        prompt: whose `answer` is a text or an integer.
        text: the response; white space at its ends is nothing.

    Returns:
        As of `exact_reward`.
    """
    return exact_reward(text, prompt.answer)


def score_code(
    prompt: Prompt,
    text: str,
    *,
    partial: bool = False,
    total_s: float = TOTAL_S,
    **of_sandbox: Any,
) -> Score:
    """`code`: whether the program in a response passes its tests; see `oxrl.rewards.code`.

    Args:
        prompt: whose `answer` holds the tests.
        text: the response.
        partial, total_s: as of `judged`.
        of_sandbox: as of `sandbox_of`; a level must be named.

    Returns:
        As of `code_reward`.
    """
    return judged(sandbox_of(**of_sandbox), text, prompt.answer, partial=partial, total_s=total_s)


def score_format(_prompt: Prompt, text: str, *, pattern: str = THINK_ANSWER) -> Score:
    """`format`: 1 if the whole response matches a pattern, else 0; see `format_reward`.

    Args:
        text: the response.
        pattern: a regular expression whose `.` matches line ends too; by default `<think>` and
            `<answer>`.

    Returns:
        As of `format_reward`.

    Raises:
        ValueError: the pattern is no regular expression.
    """
    return format_reward(text, pattern=pattern)


def score_repetition(_prompt: Prompt, text: str, *, words: int = 3, worst: float = -1.0) -> Score:
    """`repetition`: a penalty for runs of words that return; see `repetition_reward`.

    Args:
        text: the response.
        words: length of a run, at least 1.
        worst: of a text that is one run again and again, at most 0.

    Returns:
        A value from `worst` to 0.

    Raises:
        ValueError: `words` or `worst` is out of its range.
    """
    return repetition_reward(text, words=words, worst=worst)


def score_ifeval(prompt: Prompt, text: str, *, share: bool = False) -> Score:
    """`ifeval`: whether checkable instructions are followed; see `oxrl.rewards.instructions`.

    Args:
        prompt: whose `answer` names them, as `oxrl prepare ifeval` writes it.
        text: the response.
        share: the share of those that are followed, instead of all or nothing.

    Returns:
        As of `instructions_reward`.
    """
    return instructions_reward(text, prompt.answer, share=share)


def score_tool_call(prompt: Prompt, text: str) -> Score:
    """`toolcall`: 1 if a response calls the right tools, else 0; see `oxrl.rewards.tool_calls`.

    Args:
        prompt: whose `answer` holds the right calls.
        text: the response.

    Returns:
        As of `tool_call_reward`.
    """
    return tool_call_reward(text, prompt.answer)


def score_choice(prompt: Prompt, text: str) -> Score:
    """`choice`: 1 if a response names the right option, else 0; see `oxrl.rewards.choices`.

    Args:
        prompt: whose `answer` is a letter or a word.
        text: the response.

    Returns:
        As of `choice_reward`.
    """
    return choice_reward(text, prompt.answer)


# Built-in rewards that say whether an answer is right, without options that they need.
JUDGES: dict[str, Callable[[Prompt, str], Score]] = {
    "math": score_math,
    "exact": score_exact,
    "choice": score_choice,
    "ifeval": score_ifeval,
    "toolcall": score_tool_call,
}


def score_cosine(
    prompt: Prompt,
    completions: Sequence[Completion],
    *,
    judge: str = "math",
    max_tokens: int = 1024,
    **values: float,
) -> list[Score]:
    """`cosine`: short right responses and long wrong ones are worth more; see
    `cosine_length_value`.

    Args:
        prompt: as the judging reward reads it.
        completions: the group; each is scored by itself, by the number of tokens that the policy
            sampled: what an environment or a tool said is no part of its length.
        judge: a key of JUDGES, the reward that says which are right: those it gives more than 0.5.
        max_tokens: the length at which a long response's value is reached, tokens.
        values: `right_short`, `right_long`, `wrong_short` and `wrong_long` of
            `cosine_length_value`.

    Returns:
        One score for each completion, in order, with the judging reward's value as its part; where
        that has none, its failure.

    Raises:
        ValueError: `max_tokens` is below 1.
    """
    scores: list[Score] = []
    for completion in completions:
        judged = JUDGES[judge](prompt, completion.text)
        if judged.value is not None:
            right = judged.value > 0.5
            value = cosine_length_value(completion.sampled, right, max_tokens=max_tokens, **values)
            judged = Score(value=value, parts={judge: judged.value}, reason=judged.reason)
        scores.append(judged)
    return scores


def score_judge(prompt: Prompt, completions: Sequence[Completion], **options: Any) -> list[Score]:
    """`judge`: see `oxrl.rewards.judge`. In a run its own pool asks, and keeps what was said.

    Args:
        prompt: what was asked.
        completions: the group, which a judge may be asked to compare.
        options: fields of `JudgeOptions`.

    Returns:
        One score for each completion, in order.

    Raises:
        RewardDefinitionError: an option that cannot work.
    """
    from oxrl.rewards.judge.pool import JudgePool  # that asks over the network

    return JudgePool(options).score([(prompt, completions)])[0]


BUILTINS: dict[str, Callable[..., Score | float | list[Score]]] = {
    "math": score_math,
    "exact": score_exact,
    "code": score_code,
    "ifeval": score_ifeval,
    "toolcall": score_tool_call,
    "choice": score_choice,
    "format": score_format,
    "repetition": score_repetition,
    "cosine": score_cosine,
    "judge": score_judge,
    "reasoning-gym": reasoning_gym_reward,
}
# They score the completions of a group together: they read more of them than the text.
OF_GROUPS = frozenset({"cosine", "judge"})
# Functions that get the options which a reward does not name itself.
PASSES_ON: dict[str, Callable[..., object]] = {
    "code": sandbox_of,
    "cosine": cosine_length_value,
    "judge": JudgeOptions,
}
# It costs money or time elsewhere: it is not tried before a run.
UNTRIED = frozenset({"judge"})
# Comparisons in linear time, which cannot hang: they run in the caller's process.
INLINE = frozenset({"exact"})
# Options that more than a type can be wrong with; raises ValueError.
CHECKED: dict[str, Callable[[Any], object]] = {
    "pattern": compiled,
    "judge": lambda name: known(name, JUDGES),
    "words": lambda count: repetition_reward("", words=count),
    "worst": lambda value: repetition_reward("", worst=value),
    "max_tokens": lambda count: cosine_length_value(0, True, max_tokens=count),
}
# What takes all options together, and raises ValueError where they cannot work.
TOGETHER: dict[str, Callable[..., object]] = {"judge": JudgeOptions}
# What has to be there before the first sample, and is told so at the start of a run. Takes the
# options of the reward, raises RewardDefinitionError.
REQUIRES: dict[str, Callable[..., None]] = {"code": require_sandbox}


def with_options(
    name: str, options: Mapping[str, object]
) -> Callable[..., Score | float | list[Score]]:
    """A built-in reward with its options.

    Args:
        name: a key of BUILTINS.
        options: keyword arguments of its own, as `reward.options` has them.

    Returns:
        The function, which takes a prompt and a completion, or the group's completions, by
        position.

    Raises:
        ValueError: it has no such option, or not with such a value; says which it has.
    """
    function = BUILTINS[name]
    if name == "judge":
        refuse_secrets(options)
    accepted = _keywords(PASSES_ON[name]) if name in PASSES_ON else {}
    accepted |= _keywords(function)
    for option, value in options.items():
        if option not in accepted:
            listed = ", ".join(accepted) or "none"
            hint = did_you_mean(option, accepted)
            raise ValueError(f"{name} has no option {option!r}; it has {listed}{hint}")
        problem = _option_problem(option, value, accepted[option].default)
        if problem:
            raise ValueError(f"{name}: {option} {problem}")
    if name in TOGETHER:
        TOGETHER[name](**options)
    return functools.partial(function, **options)


def _keywords(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The parameters of a function that are passed by name alone."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _option_problem(option: str, value: object, default: object) -> str:
    """Why an option cannot have a value; empty if it can."""
    kind = type(default)
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if isinstance(value, bool) and kind is not bool:
        fits = False
    if default is not inspect.Parameter.empty and not fits:
        return f"must be of type {kind.__name__}, got {value!r}"
    try:
        CHECKED.get(option, str)(value)
    except ValueError as error:
        return str(error)
    return ""
