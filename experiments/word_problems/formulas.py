"""What a formula gives, and the reward of a response that is one: `formulas.py:right`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

STEP = re.compile(r"([nm])([1-9])([+\-*/])([nm])([1-9])")
MOST_STEPS = 2


class Prompt(Protocol):
    """What a reward gets, as far as it is read here."""

    answer: str


def value(formula: str, numbers: Sequence[int]) -> Fraction | None:
    """The result of the last step; None of what is no formula or has no result.

    Args:
        formula: one or two steps, "n1*n2 m1+n3", with or without spaces. n1 is the first number, m1
            the result of the first step.
    """
    text = formula.replace(" ", "")
    steps = STEP.findall(text)
    if not 1 <= len(steps) <= MOST_STEPS or "".join("".join(step) for step in steps) != text:
        return None
    results: list[Fraction] = []
    for kind, place, sign, other_kind, other_place in steps:
        one = operand(kind, int(place), numbers, results)
        other = operand(other_kind, int(other_place), numbers, results)
        if one is None or other is None or (sign == "/" and other == 0):
            return None
        results.append(applied(one, sign, other))
    return results[-1]


def operand(
    kind: str, place: int, numbers: Sequence[int], results: Sequence[Fraction]
) -> Fraction | None:
    """A number of the text or an earlier result; None where there is none of that name."""
    known = numbers if kind == "n" else results
    return Fraction(known[place - 1]) if place <= len(known) else None


def applied(one: Fraction, sign: str, other: Fraction) -> Fraction:
    if sign == "+":
        return one + other
    if sign == "-":
        return one - other
    if sign == "*":
        return one * other
    return one / other


def right(prompt: Prompt, completion: str) -> float:
    """1 if the response is a formula that gives the answer.

    Args:
        prompt: its `answer` is JSON of the problem's numbers and its answer.
    """
    given = json.loads(prompt.answer)
    return float(value(completion, given["numbers"]) == int(given["answer"]))
