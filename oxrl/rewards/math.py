"""Is the final answer of a response mathematically equal to the known one?

What counts as the final answer, in this order:

1. Text up to the last `</think>` is ignored.
2. The explicit marker that stands last: `<answer>...</answer>`, `\\boxed{...}`, `#### ...`, a line
   starting `A:`, or prose such as "the answer is ...", "Final answer: ..."; prose without a digit
   or LaTeX after it does not count.
3. Without a marker: the last number, or what math-verify reads if the response holds LaTeX or the
  answer is no number.

Plain numbers (currency, thousands commas, units and punctuation around them allowed) are compared
exactly, as decimals. Everything else goes to math-verify, without its own timeouts: it runs in a
worker process that has a deadline.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from typing import Any

from oxrl.types import Score

_MINUS = "−"
_CURRENCY = "$€£¥₹₩"
# At most 3 exponent digits: 1e999999999 must stay cheap to compare.
_NUMBER = re.compile(
    rf"""
    (?<![\w.^]) (?P<sign>[-+{_MINUS}]?\s?) [{_CURRENCY}]?\s?(?P<inner>-?)
    (?P<digits>
        \d{{1,3}}(?:,\d{{3}})+(?![\d,]) (?:\.\d+)?     # 1,234.5
      | \d{{1,2}}(?:,\d{{2}})+,\d{{3}}(?![\d,])        # 12,34,567
      | \d+,\d+(?![\d,])                               # 1000,99: a decimal comma
      | (?:\d+(?:\.\d+)?|\.\d+) (?:[eE][-+]?\d{{1,3}}(?!\w))?
    )
    (?P<percent>\s?(?:%|percent\b|pct\b))?
    """,
    re.VERBOSE,
)
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,2}(?:,\d{2})+,\d{3}")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# What may stand between boxes that state one answer together: "\boxed{1} and \boxed{2}".
_GLUE = re.compile(r"(?:\\text\{[^{}]*\}|\\q?quad|\\[()\[\],;! ]|[\s$.,;&]|\b(?:and|or)\b)*")
_LATEX = re.compile(r"\\[a-zA-Z(\[]")
_ENVIRONMENT = re.compile(r"\$|\\\(|\\\[|\\boxed")
_PROSE = re.compile(r"(?im)^\W*A:|\banswers?\b[^\n.:=]{0,60}?(?:\bis\b|:|=)")
# Bounds on what a response that repeats itself thousands of times can cost.
_LONGEST_LINE = 2000
_MOST_BOXES = 16
_LONGEST_TEXT = 10_000
_OPERATORS = re.compile(r"[/*^×÷·+]|\d\s*-|\bsqrt\b|[([{]")
_Readings = frozenset[
    Decimal
]  # what a number may mean: 20% is 20 and 0.2, as answers are published either way


@dataclass(frozen=True)
class _Final:
    """Where the response states its answer: the text there, or the whole response when `marked` is
    False.
    """

    text: str
    marked: bool
    prose: bool = False
    boxed: bool = False


def math_reward(response: str, answer: Any) -> Score:
    """1.0 if the final answer of `response` equals `answer`, else 0.0 with a reason. Rules in the
    module docstring.

    `answer` is a number or a string: "1,234", "\\frac{1}{2}", "$x^2$", or a full solution that ends
    in a marker; status is "invalid" if it cannot be read. May run for very long on hostile input
    (sympy): call it through `RewardPool`.
    """
    gold = _gold_text(answer)
    if gold is None or (_gold_number(gold) is None and not _gold_expressions(gold)):
        return Score(
            value=None,
            status="invalid",
            reason=f"cannot read the ground truth {answer!r} as mathematics",
        )
    final = _final_answer(response)
    if final is None:
        return Score(value=0.0, reason="no answer found")
    number, expected = _read_number(final), _gold_number(gold)
    if number is not None and expected is not None:
        equal = bool(number & expected)
    elif parsed := _parse(final):
        equal = _library().verify(list(_gold_expressions(gold)), parsed, timeout_seconds=None)
    else:
        return Score(value=0.0, reason=f"no answer found in {final.text[-80:]!r}")
    return Score(
        value=float(equal),
        reason="" if equal else f"read {final.text[-80:]!r}, expected {gold[-80:]!r}",
    )


def _gold_text(answer: Any) -> str | None:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return None
    if isinstance(answer, float):
        return f"{int(answer) if answer.is_integer() else answer}" if isfinite(answer) else None
    return str(answer).strip() or None


@functools.lru_cache(maxsize=4096)
def _gold_number(gold: str) -> _Readings | None:
    final = _final_answer(gold)
    return _read_number(final) if final is not None and (final.marked or _is_bare(gold)) else None


def _is_bare(text: str) -> bool:
    """True if `text` is a number and perhaps a unit, as opposed to an expression or a sentence."""
    plain = _plain(text)
    one = len(_NUMBER.findall(plain)) == 1
    return one and len(text.split()) <= 4 and not _OPERATORS.search(plain) and "=" not in text


@functools.lru_cache(maxsize=4096)
def _gold_expressions(gold: str) -> tuple[Any, ...]:
    final = _final_answer(gold)
    parsed = _parse(final if final and final.marked else _Final(gold, marked=True))
    # A string in the list is text that math-verify could not parse; alone it is no expression.
    return tuple(parsed) if any(not isinstance(item, str) for item in parsed) else ()


def _final_answer(response: str) -> _Final | None:
    """The text at the last answer marker, or everything; None if there is nothing to read."""
    text = response.rpartition("</think>")[2]
    found: list[tuple[int, _Final]] = []
    if (start := text.rfind("<answer>")) >= 0:
        content = text[start + len("<answer>") :].partition("</answer>")[0].strip()
        inner = _final_answer(content) if "<answer>" not in content else None
        found.append((start, inner if inner and inner.marked else _Final(content, marked=True)))
    if (box := _last_boxes(text)) is not None:
        found.append(box)
    if (start := text.rfind("####")) >= 0:
        found.append((start, _Final(_first_line(text[start + 4 :]), marked=True)))
    for match in _PROSE.finditer(text):
        line = re.split(
            r"[.!?](?:\s|$)",
            _first_line(text[match.end() : match.end() + _LONGEST_LINE]),
            maxsplit=1,
        )[0]
        if re.search(r"[\d\\$]", line):
            found.append((match.start(), _Final(line, marked=True, prose=True)))
    found = [item for item in found if re.search(r"\w", item[1].text)]
    if found:
        return max(found, key=lambda item: item[0])[1]
    return _Final(text, marked=False) if re.search(r"\d|\\|\$", text) else None


def _first_line(text: str) -> str:
    """The first line with content, without the punctuation that joins it to a marker."""
    return text.lstrip(" \t\r\n:=*").partition("\n")[0].strip()


def _last_boxes(text: str) -> tuple[int, _Final] | None:
    """Position and content of the last box; boxes joined by commas or "and" are one answer."""
    contents: list[str] = []
    begin = end = -1
    for match in _BOXED.finditer(text):
        if match.start() < end:
            continue
        if not (
            contents and len(contents) < _MOST_BOXES and _GLUE.fullmatch(text, end, match.start())
        ):
            contents = []
        begin, end = match.start(), closing_brace(text, match.end())
        contents.append(text[match.end() : end])
        end += 1
    return (begin, _Final(", ".join(contents), marked=True, boxed=True)) if contents else None


def closing_brace(text: str, start: int) -> int:
    """Where the brace opened just before `start` is closed; the length of `text` if it never is."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


def _plain(text: str) -> str:
    """Undo the LaTeX and markdown that may surround a plain number; any other LaTeX stays and is no
    plain number.
    """
    text = re.sub(r",\\!\s*|\{,\}", ",", text)
    text = re.sub(r"\\(?:text|mathrm|textnormal|mbox|textbf|mathbf)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\([$%])", r"\1", text)
    return re.sub(r"\\[,;:! ]|\\[()\[\]]|\*\*|`", " ", text)


def _read_number(final: _Final) -> _Readings | None:
    """The plain number stated at `final`; None if it is an expression, several numbers or not a
    number.
    """
    text = _plain(final.text)
    if _LATEX.search(text):
        return None
    if final.marked and "=" in text and re.search(r"\d", text.rpartition("=")[2]):
        text = text.rpartition("=")[2]
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    if final.marked and not final.prose:
        if re.fullmatch(r"\s*\d{1,3}(?:[ \u00a0\u202f]\d{3})+\s*", text):
            return frozenset({Decimal(re.sub(r"\s", "", text))})
        if len(matches) > 1 or _OPERATORS.search(
            text[: matches[0].start()] + text[matches[0].end() :]
        ):
            return None
        match = matches[0]
    else:
        match = matches[0] if final.prose else matches[-1]
        before, after = text[: match.start()].rstrip(), text[match.end() :].lstrip()
        if before.endswith(tuple("/*^×÷([{")) or after.startswith(tuple("/*^×÷+-=([{)]}")):
            return None
    if "," in match["digits"] and not _grouped(match["digits"]) and (final.boxed or "$" in text):
        return None  # in LaTeX "2,1" is a list, in text it is 2.1
    return _readings(match)


def _grouped(digits: str) -> bool:
    return _GROUPED.fullmatch(digits) is not None and not digits.startswith("0")


def _readings(match: re.Match[str]) -> _Readings:
    value = Decimal(match["digits"].replace(",", "" if _grouped(match["digits"]) else "."))
    if match["sign"].strip() in ("-", _MINUS) or match["inner"] == "-":
        value = value.copy_negate()
    sign, digits, exponent = value.as_tuple()
    # Not a division: that would round to the context's precision.
    return frozenset(
        {value, Decimal((sign, digits, int(exponent) - 2))} if match["percent"] else {value}
    )


@functools.cache
def _library() -> Any:
    """math-verify, imported late: sympy costs half a second that plain numbers never need."""
    import math_verify

    # It warns on every start that its own timeouts are off; the worker's deadline replaces them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _parse(final: _Final) -> list[Any]:
    """What math-verify reads at `final`; a bare expression is marked as LaTeX so that all of it is
    read.
    """
    text = final.text[-_LONGEST_TEXT:]
    if final.boxed:
        text = f"$\\boxed{{{text}}}$"
    elif (
        not _ENVIRONMENT.search(text)
        and (final.marked or _LATEX.search(text))
        and len(text.split()) <= 12
    ):
        text = f"${text.strip(' .')}$"
    return _library().parse(text, parsing_timeout=None)
