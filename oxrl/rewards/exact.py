"""The reward `exact`: a response that is the ground truth, letter by letter."""

from __future__ import annotations

from oxrl.rewards.builtin import BuiltIn
from oxrl.types import Prompt, Score


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


def score_exact(prompt: Prompt, text: str) -> Score:
    """`exact`: 1 if the response is the ground truth, letter by letter, else 0; see `exact_reward`.

    Args:
        prompt: whose `answer` is a text or an integer.
        text: the response; white space at its ends is nothing.

    Returns:
        As of `exact_reward`.
    """
    return exact_reward(text, prompt.answer)


# A comparison in linear time, which cannot hang.
EXACT = BuiltIn(score_exact, inline=True)
