"""The built-in tool `calculator`: arithmetic, and nothing else that Python could do."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

# Beyond these a calculation would take time and memory instead of giving a number.
MOST_EXPRESSION = 500
MOST_POWER = 1000
MOST_NUMBER = 10**100


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > MOST_POWER:
        raise ValueError(f"exponents go up to {MOST_POWER}")
    found = base**exponent
    if isinstance(found, complex) or not math.isfinite(found):
        raise ValueError("the power is no real number")
    return found


OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Pow: _power,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression such as (3 + 4) * 2 / 7.

    Returns:
        The value; a whole one without a point.

    Raises:
        ValueError: what the expression is not allowed to be, in words for the model.
    """
    if len(expression) > MOST_EXPRESSION:
        raise ValueError(f"an expression has at most {MOST_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    value = _value(tree.body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            found = number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in OPERATORS:
            found = OPERATORS[type(sign)](_value(operand))
        case ast.BinOp(op=kind, left=left, right=right) if type(kind) in OPERATORS:
            found = OPERATORS[type(kind)](_value(left), _value(right))
        case _:
            raise ValueError(f"only numbers, + - * / // % ** and brackets, not {ast.unparse(node)}")
    if abs(found) > MOST_NUMBER:
        raise ValueError("the number is too large")
    return found


class Calculator:
    """The built-in tool; it has no options."""

    function = staticmethod(calculator)

    def check(self) -> None:
        """Nothing to make sure of."""
