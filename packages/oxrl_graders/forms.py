"""Answers whose form is a part of what they say: times, ratios, numerals of a base, families.

`4:30 p.m.` is no `4:30 a.m.`, `2:3:5` no `2:5:3`, and `101_2` no `101`. `k\\pi, k \\in \\mathbb{Z}`
says the same whatever its integer is called.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from fractions import Fraction

from oxrl_graders.quantities import remembered
from oxrl_graders.relations import OR, alternatives, cleaned, expression

_TIME = re.compile(r"(\d{1,2})(?:[:.]([0-5]\d))?\s*([ap])\.?\s?m\.?", re.IGNORECASE)
_CLOCK = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)()")
# Of three parts and more; one of two is its quotient.
_RATIO = re.compile(r"\d{1,99}(?:\.\d{1,99})?(?:\s*(?::|\\colon|to)\s*\d{1,99}(?:\.\d{1,99})?){2,}")
_NUMERAL = re.compile(r"\(?0*(\w*\d\w*)\)?\s*_\s*\{?\s*([2-9]|[1-3]\d|[a-z]{3,5})\s*\}?")
_BASES = re.split(" ", "two three four five six seven eight nine ten")
_INTEGER = re.compile(
    r"(?:.*=)?(.+?)[,;]?\s*(?:where|for|with)?\s*\(?(?:(?:any|all|every)\s*)?(?:integers?)?\s*"
    r"\b([a-zA-Z])\s*(?:\\in\s*\\mathbb\s*\{?\s*Z\s*\}?|(?:is\s+)?any?\s+integer)?\)?"
)
_NEAREST = 41  # values of a family that are compared, those that are the nearest to 0


def same_form(gold: str, answer: str) -> bool | None:
    """Compare two answers that are times, ratios, numerals or families.

    Args:
        gold, answer: of one answer each, without its marker.

    Returns:
        True if they are the same; None where neither has such a form.
    """
    texts = (cleaned(gold), cleaned(answer))
    are_times = any(map(_TIME.fullmatch, texts)) or all(map(_CLOCK.fullmatch, texts))
    meant, said = (_form(text, are_times) for text in texts)
    return None if meant is said is None else meant == said


@remembered
def _form(text: str, are_times: bool) -> Hashable | None:
    """Return one value for all spellings of such an answer; None for an answer of another form."""
    if match := are_times and (_TIME.fullmatch(text) or _CLOCK.fullmatch(text)):
        hour = int(match[1])
        if match[3]:
            hour = hour % 12 + 12 * (match[3] in "pP")
        return "time", 60 * hour + int(match[2] or 0)
    if _RATIO.fullmatch(text):
        parts = [Fraction(part) for part in re.findall(r"[\d.]+", text)]
        return tuple(part / (max(parts) or 1) for part in parts)
    if match := _NUMERAL.fullmatch(text):
        base = _BASES.index(match[2]) + 2 if match[2] in _BASES else match[2]
        return match[1].lower(), str(base)
    return _family(text) if r"\mathbb" in text or "integer" in text else None


def _family(text: str) -> Hashable | None:
    """The values of terms in an integer that are the nearest to 0."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    index = expression(match[2])
    values: set[float] = set()
    for piece in alternatives(OR.sub(",", match[1])):
        term = expression(piece.strip(" ,"))
        # Of what is not real for every integer, such as 1/k, no values are compared.
        if term is None or term.free_symbols != {index} or not term.is_real:
            return None
        values |= {round(float(term.subs(index, number)), 9) for number in range(-99, 100)}
    return tuple(sorted(values, key=lambda value: (abs(value), value))[:_NEAREST])
