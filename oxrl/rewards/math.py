"""Is the final answer of a response mathematically equal to the known one?

What counts as the final answer, in this order:

1. Text up to the last `</think>` is ignored.
2. The explicit marker that stands last: `<answer>...</answer>`, `\\boxed{...}`, `#### ...`, a line
   starting `A:`, or prose such as "the answer is ...", "Final answer: ..."; prose without a digit
   or LaTeX after it does not count.
3. Without a marker: the last number, or what math-verify reads if the response holds LaTeX or the
   answer is no number.

Plain numbers (currency, thousands commas, units and punctuation around them allowed) are compared
exactly, as decimals: math-verify takes 20 times as long and decides some spellings otherwise.
Inequalities and intervals are compared as the sets of numbers they are (`relations`), never by a
number that stands in them, and several solutions as the values they name (`solutions`). Everything
else goes to math-verify, without its own timeouts: it runs in a worker process that has a deadline.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from types import ModuleType

from oxrl.rewards.relations import (
    RELATIONS,
    compare,
    is_relation,
    mark_relations,
)
from oxrl.rewards.solutions import names_solutions, same_solutions
from oxrl.types import Score

_MINUS = "−"
_CURRENCY = "$€£¥₹₩"
_SPACES = "\\ \u00a0\u202f\u2009"  # what may stand between thousands
# At most 3 exponent digits: 1e999999999 must stay cheap to compare.
_NUMBER = re.compile(
    rf"""
    (?<![\w.^]) (?P<sign>[-+{_MINUS}]?\s?) [{_CURRENCY}]?\s?(?P<inner>-?)
    (?P<digits>
        \d{{1,3}}(?:,\d{{3}})+(?![\d,]) (?:\.\d+)?     # 1,234.5
      | \d{{1,3}}(?:[{_SPACES}]\d{{3}})+(?![\d,]) (?:\.\d+)?     # 1 234.5
      | \d{{1,2}}(?:,\d{{2}})+,\d{{3}}(?![\d,])        # 12,34,567
      | \d+,\d+(?![\d,])                               # 1000,99: a decimal comma
      | (?:\d+(?:\.\d+)?|\.\d+) (?:[eE][-+]?\d{{1,3}}(?!\w))?
    )
    (?P<percent>\s?(?:%|percent\b|pct\b))?
    """,
    re.VERBOSE,
)
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,2}(?:,\d{2})+,\d{3}")
# 1 234 567 as LaTeX has it, which math-verify reads as several numbers.
_SPACED = re.compile(rf"(?<![\w.^])\d{{1,3}}(?:(?:[{_SPACES}~]|\\[,;:! ])\d{{3}})+(?!\d)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# What may stand between boxes that state one answer together: "\boxed{1} and \boxed{2}".
_GLUE = re.compile(r"(?:\\text\{[^{}]*\}|\\q?quad|\\[()\[\],;! ]|[\s$.,;&]|\b(?:and|or)\b)*")
_LATEX = re.compile(r"\\[a-zA-Z(\[]")
_ENVIRONMENT = re.compile(r"\$|\\\(|\\\[|\\boxed")
_PROSE = re.compile(r"(?im)^\W*A:|\banswers?\b(?!>)[^\n.:=]{0,60}?(?:\bis\b|:|=)")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)")
# Bounds on what a response that repeats itself thousands of times can cost.
_LONGEST_LINE = 2000
_MOST_BOXES = 16
_LONGEST_TEXT = 10_000
_LONGEST_STATEMENT = 12  # words
_OPERATORS = re.compile(r"[/*^×÷·+±<>≤≥≠]|\d\s*-|\bsqrt\b|[([{]")
# A number of running text beside one of these is a part of an expression.
_BINDS_BEFORE = (*"/*^×÷±([{", *RELATIONS)
_BINDS_AFTER = (*"/*^×÷+-=([{)]}", *RELATIONS)
# "x = 1 or x = 3" states no number, "x = 2 + 3 = 5" does.
_SEVERAL = re.compile(r"=.*(?:\bor\b|\band\b|[;&]|,(?!\d{3})).*=")
# Variables that no unit is called by, right after a number; and one that a sign follows.
_FACTOR = re.compile(r"[xyz](?![a-zA-Z])")
_OPERAND = re.compile(r"(?<![a-zA-Z])(?:[b-zB-HJ-Z]|[a-zA-Z]\^\{?\d+\}?|\d*[xyz]\))$")
_MATH = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINED = re.compile(r"\W*(?:\b(?:or|and)\b\W*)*")
_COMMAND = re.compile(r"\\text\{[^{}]*\}|\\[a-zA-Z]+")
_ASSIGNED = re.compile(r"[\s$\\(\[]*([a-zA-Z])\s*=")
_STRUCTURE = re.compile(
    r"""
    \d[^\d\n]*[,;=<>≤≥≠∪∈±({\[] | [,;=<>≤≥≠∪∈±({\[][^\d\n]*\d
  | \b[a-zA-Z]\s*[<>≤≥≠]\s*[a-zA-Z]\b | \d\s*,?\s*\b(?:or|and)\b
    """,
    re.VERBOSE,
)
_WORD = re.compile(r"(?!and\b|or\b)\b[a-zA-Z]{2}")
# Three letters in a row, but for functions and names in LaTeX; and the short words of English.
_PROSE_WORD = re.compile(
    r"(?<![\\a-zA-Z])(?:(?!(?:sin|cos|tan|cot|log|exp|sqrt|abs|max|min)\b)[a-zA-Z]{3,}"
    r"|(?:is|it|we|so|of|to|in|by|be|at|as|if|an|am|my|he|me|no|do|on|km|cm|mm|kg|mg|ml)\b)"
)
# A sum with a variable in it: x^2 - 3x + 2, (x - 1)(x - 2).
_SUM = re.compile(
    r"""
    (?<![a-zA-Z\\]) [a-zA-Z] (?:\^\{?\d+\}?)? [)}]* \s*[-+−]\s* [\w(\\]       # x^2 - 3
  | [\d)}] \s*[-+−]\s* \d* \s? (?<![a-zA-Z]) [a-zA-Z] (?![a-zA-Z])             # 2 - 3x
  | \d \s? [xyz] (?![a-zA-Z])                                                   # 2x
    """,
    re.VERBOSE,
)
_LISTED = re.compile(r"\s*(?:[,;]|,?\s*\b(?:or|and)\b)\s*\$?\s*[-+−]?\$?\d")
# A quoted line of markdown, in running text.
_QUOTE = re.compile(r"(?m)^\s*>+\s")
# What a number may mean: 20% is 20 and 0.2, as answers are published either way.
_Readings = frozenset[Decimal]


@dataclass(frozen=True)
class _Final:
    """The text that states the answer, and where its marker starts: -1 if there is none."""

    text: str
    start: int = -1
    prose: bool = False
    boxed: bool = False

    @property
    def marked(self) -> bool:
        return self.start >= 0


def math_reward(response: str, answer: object) -> Score:
    """Score 1 if the final answer of `response` equals `answer`, else 0.

    The module's docstring says what counts as the final answer. May run for very long on hostile
    input (sympy): call it through `RewardPool`.

    Args:
        response: the text that the model wrote.
        answer: the ground truth, a number or a string: "1,234", "\\frac{1}{2}", "$x^2$", or a full
            solution that ends in a marker.

    Returns:
        Value 1.0, or 0.0 with a reason; status "invalid" if `answer` cannot be read.
    """
    gold = _gold_text(answer)
    if gold is None or not _is_readable(gold):
        reason = f"cannot read the ground truth {answer!r} as mathematics"
        return Score(value=None, status="invalid", reason=reason)
    final = _final_answer(response)
    if final is None:
        return Score(value=0.0, reason="no answer found")
    equal = _is_equal(final, gold)
    if equal is None:
        return Score(value=0.0, reason=f"no answer found in {final.text[-80:]!r}")
    if equal:
        return Score(value=1.0)
    return Score(value=0.0, reason=f"read {final.text[-80:]!r}, expected {gold[-80:]!r}")


def _gold_text(answer: object) -> str | None:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return None
    if isinstance(answer, float):
        if not isfinite(answer):
            return None
        if answer.is_integer():
            answer = int(answer)
    return str(answer).strip() or None


@functools.lru_cache(maxsize=4096)
def _gold_number(gold: str) -> _Readings | None:
    final = _final_answer(gold)
    if final is not None and (final.marked and not _is_formula(gold) or _is_bare(gold)):
        return _read_number(final)
    return None


def _is_bare(text: str) -> bool:
    """True if `text` is a number and perhaps a unit, as opposed to an expression or a sentence."""
    plain = _plain(text).strip().removeprefix("+")
    if "=" in text or len(text.split()) > 4 or _OPERATORS.search(plain):
        return False
    return len(_NUMBER.findall(plain)) == 1


def _is_equal(final: _Final, gold: str) -> bool | None:
    """Whether the answer equals the ground truth; None if it cannot be read."""
    number = _read_number(final)
    expected = _gold_number(gold)
    said = _statement(final)
    meant = _statement(_gold_final(gold))
    if number is not None and expected is not None:
        named = _ASSIGNED.match(said)
        asked = _ASSIGNED.match(meant)
        another = bool(named and asked and named[1] != asked[1])  # x = 5 is not y = 5
        return bool(number & expected) and not another
    decided = same_solutions(meant, said)
    if decided is None:
        decided = compare(meant, said)
    if decided is not None:
        return decided
    parsed = _parse(final)
    if not parsed:
        return None
    return _library().verify(_gold_expressions(gold), parsed, timeout_seconds=None)


def _is_readable(gold: str) -> bool:
    meant = _statement(_gold_final(gold))
    if _gold_number(gold) is not None or is_relation(meant) or names_solutions(meant):
        return True
    return bool(_gold_expressions(gold))


def _gold_final(gold: str) -> _Final:
    final = _final_answer(gold)
    return final if final is not None and final.marked else _Final(gold, start=0)


def _statement(final: _Final) -> str:
    """The mathematics that states the answer: of running text, its last formula."""
    text = final.text[-_LONGEST_TEXT:]
    formulas = list(_MATH.finditer(text))
    if not formulas:
        states = final.marked or _is_short(text)
        return text if states else ""
    joined = _JOINED.fullmatch(_MATH.sub(" ", text))
    if len(formulas) > 1 and (joined or final.marked):
        return text  # "$x < 1$ or $x > 3$"
    last = formulas[-1]
    if not final.marked and re.search(r"\d", text[last.end() :]):
        return ""  # A number after it states the answer.
    return last[1] or last[2] or last[3]


@functools.lru_cache(maxsize=4096)
def _gold_expressions(gold: str) -> list[object]:
    parsed = _parse(_gold_final(gold))
    # A string in the list is text that math-verify could not parse; alone it is no expression.
    return [] if all(isinstance(item, str) for item in parsed) else parsed


def _final_answer(response: str) -> _Final | None:
    """The text at the last answer marker, or everything; None if there is nothing to read."""
    text = response.rpartition("</think>")[2]
    found = [*_answer_tag(text), *_last_boxes(text), *_hash_marks(text), *_prose(text)]
    readable = [final for final in found if re.search(r"\w", final.text)]
    if readable:
        return max(readable, key=lambda final: final.start)
    if _is_formula(text):
        return _Final(text, start=0)
    return _Final(text) if re.search(r"\d|\\|\$", text) else None


def _is_formula(text: str) -> bool:
    """Whether the response is nothing but a list, a relation or a bracket: it is all the answer."""
    if len(text) > _LONGEST_LINE or not _is_short(text) or _WORD.search(_COMMAND.sub(" ", text)):
        return False
    sums = "\n" not in text.strip() and _SUM.search(text)
    return bool(sums or _STRUCTURE.search(text))


def _is_short(text: str) -> bool:
    """Whether a text is no running text: of a few words, or of symbols alone."""
    return len(text.split()) <= _LONGEST_STATEMENT or not _PROSE_WORD.search(text)


def _answer_tag(text: str) -> Iterator[_Final]:
    """What the last <answer> holds; a marker inside it says more precisely where the answer is."""
    start = text.rfind("<answer>")
    if start >= 0:
        content = text[start + len("<answer>") :].partition("</answer>")[0].strip()
        inner = _final_answer(content)
        found = inner if inner and inner.marked else _Final(content)
        yield dataclasses.replace(found, start=start)


def _last_boxes(text: str) -> Iterator[_Final]:
    """The content of the last box; boxes joined by commas or "and" are one answer."""
    contents: list[str] = []
    start = end = 0
    for match in _BOXED.finditer(text):
        if match.start() < end:
            continue  # a box inside the box before
        if len(contents) == _MOST_BOXES or not _GLUE.fullmatch(text, end, match.start()):
            contents = []
        start = match.start()
        brace = closing_brace(text, match.end())
        contents.append(text[match.end() : brace])
        end = brace + 1
    if contents:
        yield _Final(", ".join(contents), start, boxed=True)


def _hash_marks(text: str) -> Iterator[_Final]:
    start = text.rfind("####")
    if start >= 0:
        yield _Final(_first_line(text[start + 4 :]), start)


def _prose(text: str) -> Iterator[_Final]:
    """Every "the answer is ..." with a digit or LaTeX in the sentence that follows."""
    for match in _PROSE.finditer(text):
        line = _first_line(text[match.end() : match.end() + _LONGEST_LINE])
        sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
        if re.search(r"[\d\\$]", sentence):
            yield _Final(sentence, match.start(), prose=True)


def _first_line(text: str) -> str:
    """The first line with content, without the punctuation that joins it to a marker."""
    return text.lstrip(" \t\r\n:=*").partition("\n")[0].strip()


def closing_brace(text: str, start: int) -> int:
    """Find where the brace that opened just before `start` is closed.

    Args:
        text: LaTeX.
        start: index in `text`, right after the opening brace.

    Returns:
        The index of the closing brace; the length of `text` if it is never closed.
    """
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


def _plain(text: str) -> str:
    """Undo the LaTeX and markdown around a plain number; other LaTeX stays, as no plain number."""
    text = re.sub(r",\\!\s*|\{,\}", ",", text)
    text = re.sub(r"\\(?:text|mathrm|textnormal|mbox|textbf|mathbf)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\([$%])", r"\1", text)
    return re.sub(r"\\[,;:! ]|\\[()\[\]]|\*\*|`|~", " ", text)


def _read_number(final: _Final) -> _Readings | None:
    """The plain number at `final`; None if it is an expression, several numbers or no number."""
    text = _plain(final.text)
    if _LATEX.search(text) or (final.marked and _SEVERAL.search(text)):
        return None
    text = mark_relations(text if final.marked else _QUOTE.sub("", text))
    if final.marked:
        result = text.rpartition("=")[2]  # "5 + 3 = 8" states 8
        if re.search(r"\d", result):
            text = result
    if final.marked and not final.prose:
        match = _only_number(text)
    else:
        match = _number_in_prose(text, last=not final.marked)
    if match is None:
        return None
    digits = match["digits"]
    if "," in digits and not _is_grouped(digits) and (final.boxed or "$" in text):
        return None  # in LaTeX "2,1" is a list, in text it is 2.1
    return _readings(match)


def _only_number(text: str) -> re.Match[str] | None:
    """The number in a text that states one, perhaps with a unit."""
    matches = list(_NUMBER.finditer(text))
    if len(matches) != 1:
        return None
    before = text[: matches[0].start()]
    after = text[matches[0].end() :]
    if _FACTOR.match(after.lstrip()) or (matches[0]["sign"] and _OPERAND.search(before.rstrip())):
        return None
    return None if _OPERATORS.search(before + after) else matches[0]


def _number_in_prose(text: str, last: bool) -> re.Match[str] | None:
    """The first or last number of running text, if it stands for itself."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    match = matches[-1 if last else 0]
    before = text[: match.start()].rstrip()
    after = text[match.end() :].lstrip()
    if before.endswith(_BINDS_BEFORE) or after.startswith(_BINDS_AFTER):
        return None
    if _FACTOR.match(after) or (match["sign"] and _OPERAND.search(before)):
        return None
    if not last and _LISTED.match(text, match.end()):
        return None  # "5 or -5" is two answers.
    return match


def _is_grouped(digits: str) -> bool:
    return _GROUPED.fullmatch(digits) is not None and not digits.startswith("0")


def _readings(match: re.Match[str]) -> _Readings:
    text = re.sub(r"\s", "", match["digits"])
    value = Decimal(text.replace(",", "" if _is_grouped(text) else "."))
    if match["sign"].strip() in ("-", _MINUS) or match["inner"] == "-":
        value = value.copy_negate()
    if not match["percent"]:
        return frozenset({value})
    # Not a division: that would round to the context's precision.
    sign, digits, exponent = value.as_tuple()
    hundredth = Decimal((sign, digits, int(exponent) - 2))
    return frozenset({value, hundredth})


@functools.cache
def _library() -> ModuleType:
    """math-verify, imported late: sympy costs half a second that plain numbers never need."""
    import math_verify

    # It warns on every start that its own timeouts are off; the worker's deadline replaces them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _parse(final: _Final) -> list[object]:
    """What math-verify reads; a bare expression is marked as LaTeX so that all of it is read."""
    text = _SPACED.sub(lambda digits: re.sub(r"\D", "", digits[0]), final.text[-_LONGEST_TEXT:])
    if final.boxed:
        text = f"$\\boxed{{{text}}}$"
    elif not _ENVIRONMENT.search(text) and _is_short(text):
        if final.marked or _LATEX.search(text):
            text = f"${text.strip(' .')}$"
    return _library().parse(text, parsing_timeout=None)
