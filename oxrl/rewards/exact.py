"""String equality: the reward of tasks whose answer has one spelling."""

from __future__ import annotations

from typing import Any

from oxrl.types import Score


def exact_reward(response: str, answer: Any) -> Score:
    """1.0 if `response` equals `answer`, a string or an integer, but for white space at both ends, else 0.0.

    Status "invalid" if `answer` is of another type.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        return Score(value=None, status="invalid", reason=f"exact needs a string or integer answer, got {answer!r}")
    expected, given = str(answer).strip(), response.strip()
    if given == expected:
        return Score(value=1.0)
    return Score(value=0.0, reason=f"read {given[:80]!r}, expected {expected[:80]!r}")
