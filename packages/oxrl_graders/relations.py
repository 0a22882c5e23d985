"""Answers that are inequalities, intervals, sets or tuples: what they mean, compared exactly.

math-verify solves, flips and unwraps such answers on its way to a verdict, and takes some for
others: the point (3, 1) for the set {1, 3}, the interval (-5, 5) for plus or minus 5. Here an
inequality or an interval is the set of real numbers that fulfil it, so `5 < x`, `x > 5` and
`(5, \\infty)` are one answer and `x \\ge 5` is another. What cannot be read equals nothing but its
own spelling.

Expressions are read by math-verify and solved by sympy: run this where `math_reward` runs, in a
worker with a deadline.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from oxrl_graders.quantities import (
    TEXT_COMMAND,
    closing_bracket,
    compiled,
    remembered,
    rewrite,
)

# Spelling -> relation, the longest first. A calculator's annotation, a tag and an arrow are none.
_PLAIN_RELATIONS = compiled(
    r"""
    <<[^<>\n]*>>                                   # GSM8K's <<5+3=8>>
      | (?i: </?[a-z][a-z0-9]+\s*/?> | </?[biups]> ) | <\|[^<>\n]*\|>
      | <?[-=]{2,}> | <?->
      | (?<!\b[a-zA-Z]\s)(?<!\b[a-zA-Z])=>         # but x => 5 is a relation
      « »
    ≥|⩾|≧|>=|=>                « ≥ »
    ≤|⩽|≦|<=|=<                « ≤ »
    ≠|(?<!\d)!=|=/=|=\\=|<>    « ≠ »
    <|＜|&lt;                  « < »
    >|＞|&gt;                  « > »
    """
)
RELATION = re.compile("[<>≤≥≠]")
# Relations that no set of reals tells, sets of sets and what goes on in dots: the same only if
# spelled alike.
OTHER_RELATIONS = re.compile(
    r"(?:\A|[^a-zA-Z}\]\d])\{\s*\{|\A\{.*,\s*\{|,\s*\.\.\.|"
    r"[≡≫≪⊂⊆⊃⊇∉∝]|\\(?:gg|ll|equiv|sim|cong|propto|perp|parallel|notin|n?mid|lnot|neg)(?![a-zA-Z])"
    r"|\\(?:sub|sup)set(?:eq)?(?![a-zA-Z])|\\not\s*\\in(?![a-zA-Z])"
)
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ANY_RELATION = re.compile("[<>≤≥≠=]")
_TURNED = {">": "<", "≥": "≤"}
_SYMPY_RELATIONS = {"<": "<", ">": ">", "≤": "<=", "≥": ">=", "≠": "!=", "=": "=="}
# The symbols of a statement in one way.
_SYMBOLS = compiled(
    r"""
    ∞ «\\infty »
    ∈ «\\in »
    ∪ «\\cup »
    ± «\\pm »
    ∖ «\\setminus »
    \\[lcd]?dots[cbmio]?(?![a-zA-Z]) | … «...»
    \\neq?(?![a-zA-Z]) | \\not\s*= « ≠ »
    \\gt(?![a-zA-Z]) | \\not\s*\\leq?(?![a-zA-Z]) | \\nleq(?:slant)?(?![a-zA-Z]) « > »
    \\lt(?![a-zA-Z]) | \\not\s*\\geq?(?![a-zA-Z]) | \\ngeq(?:slant)?(?![a-zA-Z]) « < »
    \\(?:ge|geq|geqq|geqslant|nless)(?![a-zA-Z]) | \\not\s*(?:<|\\lt(?![a-zA-Z])) « ≥ »
    \\(?:le|leq|leqq|leqslant|ngtr)(?![a-zA-Z]) | \\not\s*(?:>|\\gt(?![a-zA-Z])) « ≤ »
    """
)
# What only changes how an answer looks.
_LAYOUT = compiled(
    r"""
    \{,\} «,»
    \\([{}]) «\1»
    """
    rf"{TEXT_COMMAND} « \1 »"
    r"""
    \\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|q?quad|[,;:!])(?![a-zA-Z])
      | \\[ ] | \\[()\[\]] | [$~] « »
    """
)
OR = re.compile(r"\s*(?:,?\s*\bor\b|\\lor(?![a-zA-Z])|\\vee(?![a-zA-Z])|∨)\s*")
AND = re.compile(r"\s*(?:,?\s*\band\b|\\land(?![a-zA-Z])|\\wedge(?![a-zA-Z])|∧)\s*")
_SET = re.compile(r"\\(?:cup|setminus|emptyset|R|mathbb\s*\{?\s*R)(?![a-zA-Z])")
_CUP = re.compile(r"\\cup(?![a-zA-Z])")
_MEMBER = re.compile(r"\s*(\\?[a-zA-Z]+(?:_\w|_\{\w+\})?)\s*\\in(?![a-zA-Z])(.*)", re.DOTALL)
_ASSIGNED = re.compile(r"([a-zA-Z])\s*=([^=]*)", re.DOTALL)
_BUILDER = re.compile(
    r"""
    \\?\{ \s* [a-zA-Z] \s* (?:\\in\s*\\mathbb\s*\{?R\}?\s*)? (?:\||:|\\mid|\\vert)
    ([^{}]*?) \\?\}
    """,
    re.VERBOSE | re.DOTALL,
)
_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\\R(?![a-zA-Z])")
_INFINITY = re.compile(r"([-+]?)\s*(?:\\(?:infty|infinity)(?![a-zA-Z])|inf(?:inity)?|oo)\s*")
_EXACT = re.compile(r"[-+]?\s*(?:\d{1,999}(?:\.\d{1,999})?|\.\d{1,999})(?:\s*/\s*0*[1-9]\d{,99})?")
# Three letters and more in a row are a word, not a product, unless LaTeX or a function.
_WORD = re.compile(r"(?<![\\a-zA-Z])(?!(?:sin|cos|tan|cot|log|exp|sqrt|abs|max|min)\b)[a-zA-Z]{3,}")
# Of the largest number that is worked out.
_MOST_DIGITS = 100_000
_OPEN = "([{"
_CLOSE = ")]}"


@dataclass(frozen=True)
class _Meaning:
    """The meaning of a statement: the values of one variable, or relations that no set tells.

    Args:
        values: sympy Set of real numbers.
        variable: name; empty where the statement names none, as an interval.
        relations: normalized text or terms, where `values` is None.
    """

    values: Any = None
    variable: str = ""
    relations: frozenset[object] = frozenset()

    def agrees(self, other: _Meaning) -> bool:
        """True if both say the same; a statement without a variable agrees with any."""
        if self.values is None or other.values is None:
            return self.values is other.values and self.relations == other.relations
        named = {self.variable, other.variable} - {""}
        return len(named) < 2 and self.values == other.values


def mark_relations(text: str) -> str:
    """Write every plain spelling of a relation as one of `RELATIONS`, and drop what is none.

    Args:
        text: of an answer; `<=`, `!=` and the like may stand in it, and arrows, tags, annotations.

    Returns:
        The text with <, >, ≤, ≥, ≠; LaTeX spellings (`\\le`) stay.
    """
    return rewrite(text, _PLAIN_RELATIONS)


def compare(gold: str, answer: str) -> bool | None:
    """Compare two answers, where their shapes decide it.

    Inequalities and intervals are the same if they are read and hold for the same numbers (and of
    the same variable, where both name one), or if they are spelled alike. An ordered tuple is
    never a set or a list, and several answers are not one.

    Args:
        gold, answer: of one answer each.

    Returns:
        True if they are the same; None where the shapes leave it to the values.
    """
    shapes = {_shape(gold), _shape(answer)}
    if shapes & {"relation", "interval"}:
        if spelling(gold) == spelling(answer):
            return True
        meant = _read(cleaned(gold))
        said = _read(cleaned(answer))
        return meant is not None and said is not None and meant.agrees(said)
    if shapes in ({"tuple", "set"}, {"tuple", "list"}, {"single", "list"}):
        return False
    return None


@remembered
def cleaned(text: str) -> str:
    """Write every symbol of a statement in one way, and drop its layout.

    Args:
        text: of one answer, without its marker.

    Returns:
        LaTeX that the functions of this file read.
    """
    text = mark_relations(rewrite(text, _SYMBOLS))
    return rewrite(text, _LAYOUT).strip().rstrip(".;,").strip()


def spelling(text: str) -> str:
    """Write an answer without what only changes how it looks.

    Args:
        text: of one answer, without its marker.
    """
    return re.sub(r"\^\{(\w)\}", r"^\1", re.sub(r"\s|\*\*|`", "", cleaned(text)))


@remembered
def _shape(text: str) -> str:
    """relation, interval, tuple, set (with braces), list or single."""
    text = cleaned(text)
    if RELATION.search(text) or OTHER_RELATIONS.search(text):
        return "relation"
    if _MEMBER.fullmatch(text) or _is_interval(text):
        return "interval"
    inside = bracketed(text, "()")
    if inside is not None and len(split_parts(inside)) > 1:
        return "tuple"
    if bracketed(text, "{}") is not None or r"\pm" in text:
        return "set"
    several = len(split_parts(THOUSANDS.sub("", text))) > 1
    return "list" if several or OR.search(text) or AND.search(text) else "single"


def _is_interval(text: str) -> bool:
    """True if a text can only be a set of reals: infinite, half-open, square or a union."""
    if _SET.search(text):
        return True
    ends = split_parts(text[1:-1]) if re.fullmatch(r"[(\[\]][^\[\]&]*[)\]\[]", text) else []
    square = not re.fullmatch(r"\(.*\)", text)
    return len(ends) == 2 and (square or any(_INFINITY.fullmatch(end.strip()) for end in ends))


def bracketed(text: str, pair: str) -> str | None:
    """Find what one pair of brackets around the whole text holds.

    Args:
        text: LaTeX, without white space at its ends.
        pair: the opening and the closing bracket.

    Returns:
        That; None where the text is not one pair of such brackets.
    """
    end = closing_bracket(text, 1, pair)
    return text[1:-1] if text[:1] == pair[0] and end == len(text) - 1 else None


def split_parts(text: str) -> list[str]:
    """The parts between the commas and semicolons outside of brackets.

    Args:
        text: LaTeX.

    Returns:
        At least one, with their white space; commas inside of any bracket part nothing.
    """
    parts: list[str] = []
    depth = start = 0
    for position, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth <= 0 and character in ",;":
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


@remembered
def _read(text: str) -> _Meaning | None:
    """The meaning of a cleaned statement; None if it is no statement."""
    import sympy

    if not text or OTHER_RELATIONS.search(_BUILDER.sub(" ", text)):
        return None
    if builder := _BUILDER.fullmatch(text):
        return _read(builder[1].strip())
    for pattern, join in ((OR, sympy.Union), (AND, sympy.Intersection)):
        clauses = pattern.split(text)
        if len(clauses) > 1:
            return _joined(clauses, join)
    if not RELATION.search(text):
        return _read_values(text)
    if not any(bracket in text for bracket in _OPEN):
        text = THOUSANDS.sub("", text)
    clauses = split_parts(text)
    return _joined(clauses, None) if len(clauses) > 1 else _chain(text)


def _read_values(text: str) -> _Meaning | None:
    """A variable that is, or is in, some values; or the values alone."""
    variable = ""
    if match := _ASSIGNED.fullmatch(text) or _MEMBER.fullmatch(text):
        variable = match[1].lstrip("\\")
        text = match[2].strip()
    elif "=" in text:
        return _chain(text)
    values = _values(text)
    return None if values is None else _Meaning(values, variable)


def _joined(clauses: list[str], join: Callable[..., Any] | None) -> _Meaning | None:
    """The meaning of several statements at once; without `join`, a comma may mean "and" or "or"."""
    import sympy

    read: list[Any] = [_read(clause.strip()) for clause in clauses]
    if None in read:
        return None
    names = {meaning.variable for meaning in read} - {""}
    if join is None:
        # That x is real says nothing.
        read = [meaning for meaning in read if meaning.values != sympy.S.Reals]
    elif len(names) < 2 and None not in [meaning.values for meaning in read]:
        values = join(*(meaning.values for meaning in read))
        # What nothing fulfils says nothing: two such statements are not the same.
        if not values.is_empty:
            return _Meaning(values, next(iter(names), ""))
    if len(read) == 1:
        return read[0]
    return _Meaning(relations=frozenset((str(join), meaning) for meaning in read))


def _chain(text: str) -> _Meaning | None:
    """a < b < c: every neighbouring pair of sides is a relation of its own."""
    import sympy

    sides = [expression(side) for side in _ANY_RELATION.split(text)]
    if None in sides or all(side.is_number for side in sides):
        return None  # 3 < 5 says nothing.
    pairs = list(zip(sides[:-1], _ANY_RELATION.findall(text), sides[1:], strict=True))
    names: set[Any] = set().union(*(side.free_symbols for side in sides))
    if len(names) == 1:
        (variable,) = names
        solved = [_solve(left - right, relation, variable) for left, relation, right in pairs]
        if None not in solved:
            values = sympy.Intersection(*solved)
            if not values.is_empty:
                return _Meaning(values, variable.name)
    return _Meaning(relations=frozenset(_terms(left - right, op) for left, op, right in pairs))


def _solve(difference: Any, relation: str, variable: Any) -> Any:
    """The reals for which `difference relation 0` holds; None if sympy does not find them."""
    import sympy

    try:
        compared = sympy.Rel(difference, 0, _SYMPY_RELATIONS[relation])
        found = sympy.solveset(compared, variable, sympy.S.Reals)
    except (NotImplementedError, ValueError, TypeError):
        return None  # The relation itself is compared then.
    return None if found.has(sympy.ConditionSet) else found


def _terms(difference: Any, relation: str) -> tuple[str, Any]:
    """`difference relation 0` with < or ≤ and a first coefficient of 1 or -1."""
    import sympy

    if relation in _TURNED:
        difference, relation = -difference, _TURNED[relation]
    expanded = sympy.expand(difference)
    found = {term: number for term, number in expanded.as_coefficients_dict().items() if term != 1}
    leading = found[min(found, key=str)] if found else sympy.Integer(1)
    scale = leading if relation in ("=", "≠") else abs(leading)
    return relation, sympy.expand(expanded / scale)


def _values(text: str) -> Any:
    """The set of reals that an interval, a union, a finite set or a number denotes; or None."""
    import sympy

    whole, less, removed = text.partition("\\setminus")
    if less:
        parts = (_values(whole.strip()), _values(removed.strip()))
        return None if None in parts else parts[0] - parts[1]
    pieces = [_piece(piece.strip()) for piece in _CUP.split(text)]
    return None if None in pieces else sympy.Union(*pieces)


def _piece(text: str) -> Any:
    import sympy

    if _REALS.fullmatch(text):
        return sympy.S.Reals
    if text[:1] in ("(", "[", "]") and text[-1:] in (")", "]", "["):
        ends = [expression(part, infinite=True) for part in split_parts(text[1:-1])]
        if len(ends) != 2 or any(
            end is None or end.free_symbols or not end.is_extended_real for end in ends
        ):
            return None
        found = sympy.Interval(ends[0], ends[1], text[0] != "[", text[-1] != "]")
        return None if found.is_empty else found
    text = re.sub(r"^\{(.*)\}$", r"\1", text)
    if text in (r"\emptyset", ""):
        return sympy.S.EmptySet
    elements = [expression(part) for part in alternatives(text)]
    return None if None in elements else sympy.FiniteSet(*elements)


def alternatives(text: str) -> Iterator[str]:
    """Go through the elements of "1, 3", and both values of every "plus or minus".

    Args:
        text: LaTeX of a list; a comma inside of brackets parts nothing.

    Yields:
        LaTeX of one value.
    """
    for part in split_parts(text):
        yield part.replace(r"\pm", "+")
        if r"\pm" in part:
            yield part.replace(r"\pm", "-")


@remembered
def expression(text: str, infinite: bool = False) -> Any:
    """Read one term as sympy does, its symbols real.

    Args:
        text: LaTeX.
        infinite: infinity is a term too.

    Returns:
        A sympy expression; None if it is none.
    """
    import sympy

    text = text.strip()
    if match := _INFINITY.fullmatch(text):
        return (-sympy.oo if match[1] == "-" else sympy.oo) if infinite else None
    if _EXACT.fullmatch(text):
        return sympy.Rational(text.replace(" ", ""))
    if re.fullmatch("[a-hj-zA-Z]", text):
        return sympy.Symbol(text, real=True)
    if not text or _WORD.search(text):
        return None
    # Else it is a mere string, or a set, a relation, a matrix.
    found = parse(text)[:1]
    return found[0] if found and isinstance(found[0], sympy.Expr) else None


@functools.cache
def library() -> ModuleType:
    """Import math-verify late: sympy costs half a second that plain numbers never need."""
    import math_verify

    # It warns on every start that its own timeouts are off; the worker's deadline replaces them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


class EndlessError(BaseException):
    """An expression would take too long to work out. No Exception: sympy drops those."""


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Bound what runs inside, in the main thread, where a signal can end it.

    Args:
        seconds: of the clock.

    Raises:
        EndlessError: it took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise EndlessError(f"it takes more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, end)
    # Again and again: what was ended may be followed by as much.
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@remembered
def parse(text: str) -> list[Any]:
    """Read all of a text as math-verify does, and work it out; what is a unit is decided elsewhere.

    Args:
        text: LaTeX, in its dollar signs or bare.

    Returns:
        What it is taken for, and a string: the text. Empty if there is nothing to read.

    Raises:
        EndlessError: it would take days to work out.
    """
    config = library().LatexExtractionConfig()
    shown = dataclasses.replace(config.normalization_config, units=False)
    reader = dataclasses.replace(config, normalization_config=shown)
    formula = text if re.search(r"\$|\\[(\[]", text) else f"${text}$"
    found = library().parse(formula, [reader], parsing_timeout=None)
    return [_evaluated(item) for item in found]


def _evaluated(term: Any) -> Any:
    """Factorials, powers of i and the like, which math-verify leaves as they are written."""
    import sympy

    if not isinstance(term, sympy.Expr):
        return term
    _refuse_endless(term)
    real: Any = {name: sympy.Symbol(str(name), real=True) for name in term.free_symbols}
    return term.subs(real).subs(sympy.Symbol("i", real=True), sympy.I).doit()


def _refuse_endless(term: Any) -> None:
    """Raise EndlessError before sympy begins on a number that it could not be stopped at."""
    import sympy

    # From the inside out: an exponent is known to be small before its power is looked at.
    part: Any
    for part in sympy.postorder_traversal(term):
        size = 0
        if part.is_Pow:
            size = part.exp * sympy.log(sympy.Abs(part.base) + 1)
        elif part.func in (sympy.factorial, sympy.binomial):
            size = 20 * part.args[0]
        elif isinstance(part, sympy.Product):
            size = 20 * part.limits[0][2]
        if (sympy.Abs(sympy.N(size)) > _MOST_DIGITS) is sympy.true:
            raise EndlessError(f"{str(part)[:80]} is too large to be worked out")


def same_number(one: Any, other: Any) -> bool | None:
    """Compare two terms as numbers.

    Args:
        one, other: from `parse`.

    Returns:
        True if they are equal, or one is a decimal and they agree to six significant digits; None
        where they are no numbers, or may be the same.
    """
    import sympy

    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return None
    # Where symbols stand, at one place.
    place: Any = dict.fromkeys(one.free_symbols | other.free_symbols, sympy.Rational(7, 13))
    difference = (one - other).subs(place)
    try:
        shown = {f"{complex(term.subs(place).evalf(20)):.5e}" for term in (one, other)}
    except (TypeError, OverflowError):
        return None
    equal = (len(shown) == 1 and difference.has(sympy.Float)) or difference.equals(0) is True
    return None if equal and place else equal
