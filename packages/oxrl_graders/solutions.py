"""Answers that name several solutions: which ones, whatever joins them and what they are called.

`x = 1 or x = 2`, `x_1 = 2, x_2 = 1`, `\\{1, 2\\}` and `x = 1, 2` name the same two; so do
`(x, y) = (1, 2) or (3, 4)` and `(3, 4), (1, 2)`. Solutions have no order. Who says one twice says
no more by it; but where the ground truth is `1, 2, 2`, each counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from oxrl_graders.quantities import remembered
from oxrl_graders.relations import (
    AND,
    OR,
    OTHER_RELATIONS,
    RELATION,
    THOUSANDS,
    alternatives,
    bracketed,
    cleaned,
    expression,
    split_parts,
)

# "or" and its relatives, also between commas. An "and" joins solutions as well as an "or".
_JOINS = re.compile(rf"(?:{OR.pattern})|(?:{AND.pattern})|;")
_NAME = re.compile(r"\s*(\\?[a-zA-Z]+)(?:_\w|_\{\w+\})?\s*(?:=|\\in(?![a-zA-Z]))")
_TUPLE_NAME = re.compile(r"\s*(\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])+\s*\))\s*(?:=|\\in(?![a-zA-Z]))")
# Of sympy, or tuples of them.
Expressions = tuple[Any, ...]


@dataclass(frozen=True)
class _Solutions:
    """The solutions that an answer names.

    Args:
        values: sympy expressions, or tuples of them.
        name: of what is solved for, without its index; empty where the answer gives no name.
        assigned: whether it is one point, each place of which is named: "x = 1, y = 2".
        place: the values of a point, or of a list that may be one without its brackets, in the
            order in which they are written.
    """

    values: Expressions
    name: str = ""
    assigned: bool = False
    place: Expressions | None = None

    @property
    def is_point(self) -> bool:
        return len(self.values) == 1


def same_solutions(gold: str, answer: str, in_order: bool = True) -> bool | None:
    """Compare two answers that name solutions.

    Args:
        gold, answer: of one answer each, without its marker.
        in_order: a list may be a point without its brackets.

    Returns:
        True if they name the same ones; None unless both name several, or points, and all of them
        can be read.
    """
    meant = _read(cleaned(gold))
    said = _read(cleaned(answer))
    if meant is None or said is None:
        return None
    if meant.is_point != said.is_point:
        # "x = 1, y = 2" may be written "1, 2", in this order; so may (1, 2).
        ordered = said.assigned or meant.assigned or (meant.is_point and in_order)
        return ordered and said.place is not None and _equal(meant.place, said.place)
    if meant.name and said.name and meant.name != said.name:
        return False
    return _same_values(meant.values, said.values)


def _same_values(meant: Expressions, said: Expressions) -> bool:
    """True if both hold the same values in any order, and as often where the first repeats any."""
    # Up to the first value that differs: a response may list hundreds.
    if any(_count(value, meant) > 1 for value in meant):
        return all(_count(value, meant) == _count(value, said) for value in (*meant, *said))
    return all(_count(value, meant) and _count(value, said) for value in (*meant, *said))


def _count(value: Any, values: Expressions) -> int:
    return sum(_equal(value, other) for other in values)


@remembered
def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, tuple) or isinstance(other, tuple):
        return False
    return one == other or (one - other).equals(0) is True


@remembered
def _read(text: str) -> _Solutions | None:
    """The solutions that a cleaned answer names; None if it is no such list or cannot be read."""
    if RELATION.search(text) or OTHER_RELATIONS.search(text):
        return None
    clauses = _clauses(THOUSANDS.sub("", text))
    names: set[str] = set()
    values: list[Any] = []
    for clause in clauses:
        name, rest = _unnamed(clause)
        names |= {name} - {""}
        found = _values(rest)
        if found is None:
            return None
        values += found
    point = len(values) == 1 and isinstance(values[0], tuple)
    if len(names) > 1 or (len(values) < 2 and not point):
        return None
    assigned = _assignments(clauses[0]) if len(clauses) == 1 else {}
    place = values[0] if point else None
    if assigned:
        names = {f"({','.join(sorted(assigned))})"}
        place = tuple(map(expression, assigned.values()))
    elif not re.search(r"[=;()]|^\{|\bor\b|\band\b", text):
        place = tuple(values)
    return _Solutions(tuple(values), next(iter(names), ""), bool(assigned), place)


def _clauses(text: str) -> list[str]:
    """The parts of a list; "x = 1, y = 2" is one part where another one follows an "or"."""
    cases = [part.strip(" ,") for part in OR.split(text)]
    if all(_assignments(part) for part in cases):
        return cases
    return [clause for part in _JOINS.split(text) for clause in split_parts(part) if clause.strip()]


def _unnamed(clause: str) -> tuple[str, str]:
    """Split a clause into its name and the value that it gives: "x_1 = 2" is x and 2."""
    if _assignments(clause):
        return "", clause
    match = _TUPLE_NAME.match(clause) or _NAME.match(clause)
    return (re.sub(r"\s", "", match[1]), clause[match.end() :]) if match else ("", clause)


def _assignments(clause: str) -> dict[str, str]:
    """Name -> value, if the clause assigns to several different names and does nothing else."""
    found: dict[str, str] = {}
    parts = [part for piece in AND.split(clause) for part in split_parts(piece) if part.strip()]
    for part in parts:
        match = _NAME.match(part)
        if match is None or "=" not in match[0]:
            return {}
        found[match[1]] = part[match.end() :]
    return found if len(found) == len(parts) > 1 else {}


def _values(text: str) -> list[Any] | None:
    """The solutions in one clause: several of a set in braces or of "plus or minus"."""
    text = text.strip()
    assigned = _assignments(text)
    braces = bracketed(text, "{}")
    inside = bracketed(text, "()")
    if braces is not None:
        found = [_values(part) for part in split_parts(braces)]
        return None if None in found else [value for values in found if values for value in values]
    places = [assigned[name] for name in sorted(assigned)]
    if inside is not None and len(split_parts(inside)) > 1:
        places = split_parts(inside)
    read = [expression(part) for part in places or alternatives(text)]
    if None in read:
        return None
    return [tuple(read)] if places else read
