"""Rewards for how a response looks: its format, what it repeats, how long it is."""

from __future__ import annotations

import math
import re
from typing import cast

from oxrl.errors import known
from oxrl.rewards.builtin import BuiltIn, find_builtin
from oxrl.types import Completions, GroupScores, Prompt, Score

# Built-in rewards that say whether an answer is right, without options that they need.
JUDGES = ("math", "exact", "choice", "ifeval", "toolcall")

# A thought, then an answer, and nothing else.
# Source: DeepSeek-R1, arXiv:2501.12948, section 2.2: the format reward of its template.
THINK_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"


def format_reward(response: str, _answer: object = None, *, pattern: str = THINK_ANSWER) -> Score:
    """Score 1 if a whole response matches a regular expression, else 0.

    Args:
        response: the text that the model wrote.
        pattern: of Python's `re`; `.` matches line ends too.

    Returns:
        Value 1.0, or 0.0 with a reason.

    Raises:
        ValueError: the pattern is no regular expression.
    """
    if compiled(pattern).fullmatch(response):
        return Score(value=1.0)
    return Score(value=0.0, reason=f"does not match {pattern[:80]!r}")


def compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression whose `.` matches line ends too.

    Args:
        pattern: as `re` has them.

    Returns:
        The pattern, compiled with `re.DOTALL`.

    Raises:
        ValueError: it is none; says where.
    """
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


def repetition_reward(
    response: str, _answer: object = None, *, words: int = 3, worst: float = -1.0
) -> Score:
    """Punish a response for runs of words that it repeats.

    value = worst * (1 - different runs of `words` words / all runs)

    Source: Yeo et al. 2025, arXiv:2502.03373, section 4.3 and appendix, punishes repeated n-grams;
    the share of them as here: huggingface/open-r1, src/open_r1/rewards.py,
    get_repetition_penalty_reward.

    Args:
        response: the text that the model wrote.
        words: length of a run, at least 1.
        worst: what a text of nothing but one run tends to, at most 0.

    Returns:
        A value from `worst` to 0, which a text shorter than one run has.
    """
    if words < 1 or worst > 0:
        raise ValueError(f"need words >= 1 and worst <= 0, got {words} and {worst}")
    said = response.lower().split()
    runs = [tuple(said[start : start + words]) for start in range(len(said) - words + 1)]
    if not runs:
        return Score(value=0.0)
    return Score(value=worst * (1 - len(set(runs)) / len(runs)))


def cosine_length_value(
    tokens: int,
    right: bool,
    *,
    max_tokens: int,
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
) -> float:
    """Score a response by its length: short is better if it is right, long if it is wrong.

    long + (short - long) * (1 + cos(pi * tokens / max_tokens)) / 2, tokens at most max_tokens.

    Source: Yeo et al. 2025, arXiv:2502.03373, section 4.2: CosFn(t, T, low, high) for right and for
    wrong responses; its extra value of responses that are cut is what `wrong_long` is then.
    Defaults: huggingface/open-r1, src/open_r1/rewards.py, get_cosine_scaled_reward.

    Args:
        tokens: length of the response.
        right: whether the response is right.
        max_tokens: the longest, where the long value is reached; at least 1.
        right_short, right_long, wrong_short, wrong_long: values at length 0 and at max_tokens.

    Returns:
        The value.
    """
    if max_tokens < 1:
        raise ValueError(f"need max_tokens >= 1, got {max_tokens}")
    short = right_short if right else wrong_short
    long = right_long if right else wrong_long
    share = min(tokens, max_tokens) / max_tokens
    return long + (short - long) * (1 + math.cos(math.pi * share)) / 2


def score_cosine(
    prompt: Prompt,
    completions: Completions,
    *,
    judge: str = "math",
    max_tokens: int = 1024,
    **values: float,
) -> GroupScores:
    """`cosine`: short right responses and long wrong ones are worth more; see
    `cosine_length_value`.

    Args:
        prompt: as the judging reward reads it.
        completions: the group; each is scored by itself, by the number of tokens that the policy
            sampled: what an environment or a tool said is no part of its length.
        judge: one of JUDGES, the reward that says which are right: those it gives more than 0.5.
        max_tokens: the length at which a long response's value is reached, tokens.
        values: `right_short`, `right_long`, `wrong_short` and `wrong_long` of
            `cosine_length_value`.

    Returns:
        One score for each completion, in order, with the judging reward's value as its part; where
        that has none, its failure.

    Raises:
        ValueError: `max_tokens` is below 1.
    """
    row = find_builtin(judge)
    assert row is not None
    scores: GroupScores = []
    for completion in completions:
        judged = cast(Score, row.score(completion.text, prompt.answer))
        if judged.value is not None:
            right = judged.value > 0.5
            value = cosine_length_value(completion.sampled, right, max_tokens=max_tokens, **values)
            judged = Score(value=value, parts={judge: judged.value}, reason=judged.reason)
        scores.append(judged)
    return scores


FORMAT = BuiltIn(format_reward, checks={"pattern": compiled})
REPETITION = BuiltIn(
    repetition_reward,
    checks={
        "words": lambda count: repetition_reward("", words=count),
        "worst": lambda value: repetition_reward("", worst=value),
    },
)
COSINE = BuiltIn(
    score_cosine,
    takes="group",
    passes_on=cosine_length_value,
    checks={
        "judge": lambda name: known(name, JUDGES),
        "max_tokens": lambda count: cosine_length_value(0, True, max_tokens=count),
    },
)
