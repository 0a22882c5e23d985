"""A reward called on a made-up sample, and on prompts of the data, where it was loaded.

The made-up sample finds what can never work: a name that does not exist, a value that is no number.
Other exceptions it may have caused itself, by an answer of another kind than the data's; those are
judged on prompts of the data.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from oxrl.errors import RewardDefinitionError
from oxrl.rewards.loaded import LoadedReward
from oxrl.rewards.trial import DRY_GROUP, DRY_TEXT, described
from oxrl.types import Completion, Completions, Prompt, Score, Segment
from oxrl.usercode.user_code import raised_as, text_of

DRY_PROMPT = Prompt(
    uid="dry-call",
    messages=({"role": "user", "content": "1 + 1?"},),
    token_ids=(1, 2),
    answer="2",
    plain=True,
)


def dry_call(reward: LoadedReward) -> None:
    """Call a reward once on a made-up sample.

    That fails on what can never work (a wrong return type, an unknown name, a missing module or
    attribute of `Prompt`); other exceptions may be due to the made-up answer "2" and are left to
    the data.

    Args:
        reward: loaded, and not yet trusted.

    Raises:
        RewardDefinitionError: it can never work; says where and what to change.
    """
    prompt = dataclasses.replace(DRY_PROMPT, metadata=dict.fromkeys(reward.columns, "2"))
    given = given_of(reward, DRY_TEXT)
    called = f"reward.name={reward.name}: {described(per_sample=reward.per_sample)}"
    try:
        value = reward.call(prompt, given)
    except Exception as error:  # any: it is the user's code
        if not is_sure(error, given):
            return
        raised = raised_as(error, reward.path)
        raise RewardDefinitionError(f"{called} raised {raised}") from error
    problem = reward.problem(value, DRY_GROUP) or not_finite(value, reward)
    if problem:
        raise RewardDefinitionError(f"{called} {problem}")


def given_of(reward: LoadedReward, text: str) -> str | Completions:
    """Return what a reward is called with to score a text: the text, or a small group of it alone.

    Args:
        reward: which says by `per_sample` what it takes.
        text: of every completion.

    Returns:
        The text, or DRY_GROUP completions of it with one made-up token.
    """
    if reward.per_sample:
        return text
    segment = Segment(token_ids=(3,), logprobs=(0.0,), versions=(0,))
    return [Completion(segments=(segment,), text=text, finish_reason="stop")] * DRY_GROUP


def not_finite(value: Any, reward: LoadedReward) -> str:
    """Say which of the values returned for the dry call is NaN or infinite; empty if none is.

    Args:
        value: what the function returned; `LoadedReward.problem` found it fine.
        reward: which says by `per_sample` whether that is one value or a list.

    Returns:
        A reason that goes on after "the function ...".
    """
    values = [value] if reward.per_sample else list(value)
    for item in values:
        number = item.value if isinstance(item, Score) else item
        try:
            wrong = number is not None and not math.isfinite(float(number))
        except Exception as error:  # noqa: BLE001 - `__float__` is the user's, or a library's
            return f"returned {type(item).__name__}, which is no single number: {text_of(error)}"
        if wrong:
            return f"returned {number}, need a finite number"
    return ""


def is_sure(error: Exception, given: object) -> bool:
    """True if a function that raised `error` in the dry call would raise it on every sample.

    Args:
        error: what it raised.
        given: what it was called with, beside the prompt.

    Returns:
        True of unknown names, missing modules, and attributes that oxRL's own objects do not have;
        False where only a made-up answer may be to blame.
    """
    # A missing attribute counts only if it is missing from what oxRL always passes: the real
    # answers may be mappings, so `prompt.answer.get` may be right.
    if isinstance(error, AttributeError):
        return error.obj is given or isinstance(error.obj, Prompt | Completion)
    return isinstance(error, NameError | ImportError)


def rehearse(reward: LoadedReward, prompt: Prompt) -> tuple[str, str]:
    """Call a reward on a prompt of the data with completions that usual rewards can read.

    Args:
        reward: loaded.
        prompt: whose answer is made a completion, in the forms that usual rewards read.

    Returns:
        What the last call raised, or why its value is none, if not one call worked, else nothing;
        and how the first value that is one differs from that of the same call again, if it does.
    """
    answer = "2" if prompt.answer is None else str(prompt.answer)
    texts = [
        f"#### {answer}",
        answer,
        f"\\boxed{{{answer}}}",
        f"<answer>{answer}</answer>",
        json.dumps({"answer": answer}),
    ]
    problem = ""
    for text in texts:
        try:
            value = reward.call(prompt, given_of(reward, text))
        except Exception as error:  # noqa: BLE001 - whatever user code raises is the result
            raised = raised_as(error, reward.path)
            problem = f"raised {raised} for completion {text[:80]!r}"
            continue
        problem = reward.problem(value, DRY_GROUP)
        if not problem:
            return "", difference(reward, prompt, text, value)
    return problem, ""


def difference(reward: LoadedReward, prompt: Prompt, text: str, value: object) -> str:
    """Describe how a second call with the same completion differs; empty where it does not.

    Args:
        reward: loaded; it is called once more.
        prompt: of the data.
        text: of the completion.
        value: what the first call returned, without a problem.

    Returns:
        The two numbers, the completion and the prompt in words; empty too where a number cannot be
        had.
    """
    from oxrl.rewards.repeats import differs  # with the logging that it imports

    try:
        again = numbers_of(reward.call(prompt, given_of(reward, text)), reward)
        first = numbers_of(value, reward)
    except Exception:  # noqa: BLE001 - whatever user code raises, a run counts it as a failure
        return ""
    for before, now in zip(first, again, strict=False):
        if differs(before, now):
            return (
                f"{before:g} and then {now:g} for completion {text[:80]!r} of prompt {prompt.uid}"
            )
    return ""


def numbers_of(value: Any, reward: LoadedReward) -> list[float]:
    """The scores in what a reward returned; of a failed one 0.

    Args:
        value: what the function returned, without a problem.
        reward: which says by `per_sample` whether that is one value or a list.

    Returns:
        One number for each completion, in order.

    Raises:
        Exception: whatever a value's own `__float__` raises.
    """
    values = [value] if reward.per_sample else list(value)
    scores = [item.value if isinstance(item, Score) else item for item in values]
    return [0.0 if score is None else float(score) for score in scores]
