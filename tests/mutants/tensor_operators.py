"""Ways to break a formula that only tensor code knows, as operators of cosmic-ray, and the list of
all operators that are used.

cosmic-ray's own operators swap signs, comparisons and numbers. What goes wrong in a loss is as
often a lost `detach`, a bound that is gone, one side of a gate, or the branches of a `where`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider

Position = tuple[tuple[int, int], tuple[int, int]]
# Nodes of parso, whose classes carry no types.
Node = Any

# Of cosmic-ray. Pairs that tensors of floats do not have (shifts, remainders) are left out: a
# TypeError is killed by any test, and would only make the share of killed mutants look better.
LIBRARY = (
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBinaryOperator_Mul_Div",
    "ReplaceBinaryOperator_Div_Mul",
    "ReplaceBinaryOperator_Pow_Mul",
    "ReplaceBinaryOperator_FloorDiv_Mul",
    "ReplaceBinaryOperator_BitAnd_BitOr",
    "ReplaceBinaryOperator_BitOr_BitAnd",
    "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_Gt_Lt",
    "ReplaceComparisonOperator_GtE_Gt",
    "ReplaceComparisonOperator_GtE_LtE",
    "ReplaceComparisonOperator_Lt_LtE",
    "ReplaceComparisonOperator_Lt_Gt",
    "ReplaceComparisonOperator_LtE_Lt",
    "ReplaceComparisonOperator_LtE_GtE",
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceComparisonOperator_Is_IsNot",
    "ReplaceComparisonOperator_IsNot_Is",
    "ReplaceUnaryOperator_Delete_USub",
    "ReplaceUnaryOperator_Delete_Invert",
    "ReplaceUnaryOperator_Delete_Not",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "NumberReplacer",
    "ZeroIterationForLoop",
)

# Methods of one tensor whose result has the same shape and could stand without them.
REMOVABLE = {
    "abs",
    "clamp",
    "detach",
    "exp",
    "expm1",
    "log",
    "log1p",
    "nan_to_num",
    "relu",
    "rsqrt",
    "sign",
    "sqrt",
    "square",
}
OPPOSITE = {
    "all": "any",
    "any": "all",
    "exp": "expm1",
    "expm1": "exp",
    "log": "log1p",
    "log1p": "log",
    "max": "min",
    "maximum": "minimum",
    "mean": "sum",
    "min": "max",
    "minimum": "maximum",
    "sum": "mean",
}
# Sums, products, conjunctions and disjunctions of parso's grammar.
CHAINS = {"arith_expr", "term", "and_expr", "expr"}


def position(node: Node) -> Position:
    return node.start_pos, node.end_pos


def is_trailer(node: Node, opening: str) -> bool:
    return node.type == "trailer" and node.children[0].value == opening


class RemoveMethod(Operator):
    """`x.detach()` becomes `x`, and so for every method of `REMOVABLE`."""

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        for _, name in list(self.calls(node)):
            yield position(name)

    def mutate(self, node: Node, index: int) -> Node:
        first = list(self.calls(node))[index][0]
        del node.children[first : first + 2]
        return node

    @staticmethod
    def calls(node: Node) -> Iterator[tuple[int, Node]]:
        """Where in the chain `x.a.b()` a removable method is called; `torch.exp(x)` is none."""
        if node.type != "atom_expr" or node.children[0].get_code().strip() == "torch":
            return
        for i in range(1, len(node.children) - 1):
            name = node.children[i]
            called = is_trailer(node.children[i + 1], "(")
            if is_trailer(name, ".") and called and name.children[1].value in REMOVABLE:
                yield i, name

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("y = x.detach()", "y = x"), Example("y = -x.clamp(min=0)", "y = -x"))


class OppositeName(Operator):
    """`min` becomes `max`, `any` becomes `all`, `mean` becomes `sum`: methods and keywords."""

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        if node.type == "name" and node.value in OPPOSITE and self.is_called(node):
            yield position(node)

    def mutate(self, node: Node, index: int) -> Node:
        node.value = OPPOSITE[node.value]
        return node

    @staticmethod
    def is_called(name: Node) -> bool:
        """Whether it is a method, a keyword of a call, or a built-in function that is called."""
        parent = name.parent
        if is_trailer(parent, "."):
            return True
        if parent.type == "argument":
            return parent.children[0] is name
        return parent.type == "atom_expr" and parent.children[0] is name

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("y = x.clamp(min=0)", "y = x.clamp(max=0)"),)


class SwapBranches(Operator):
    """`torch.where(a, b, c)` becomes `torch.where(a, c, b)`."""

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        if self.arguments_of(node):
            yield position(node)

    def mutate(self, node: Node, index: int) -> Node:
        second, third = self.arguments_of(node)
        siblings = second.parent.children
        i = siblings.index(second)
        j = siblings.index(third)
        siblings[i], siblings[j] = third, second
        return node

    @staticmethod
    def arguments_of(node: Node) -> list[Node]:
        """The second and third argument of a call of `torch.where`."""
        if node.type != "atom_expr" or len(node.children) != 3:
            return []
        head = node.children[0].get_code().strip() + node.children[1].get_code().strip()
        call = node.children[2]
        if head != "torch.where" or call.children[1].type != "arglist":
            return []
        return call.children[1].children[2:5:2]

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("torch.where(a, b, c)", "torch.where(a, c, b)"),)


class DropOperand(Operator):
    """One term of a sum, factor of a product or side of a condition is left out."""

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        for i in list(self.operands(node)):
            if i < len(node.children):  # the caller goes on asking after `mutate`
                yield position(node.children[i])

    def mutate(self, node: Node, index: int) -> Node:
        i = list(self.operands(node))[index]
        if i > 0:
            del node.children[i - 1 : i + 1]
        elif node.children[1].value == "-":
            del node.children[0]
        else:
            del node.children[0:2]
        return node

    @staticmethod
    def operands(node: Node) -> Iterator[int]:
        """Indices of what may be left out: of the first, only where what follows still stands."""
        if node.type not in CHAINS:
            return
        for i in range(0, len(node.children), 2):
            if i > 0 or node.children[1].value in ("+", "-", "*", "&", "|"):
                yield i

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("y = a & b", "y = a", 1), Example("y = a - b", "y = - b", 0))


OURS: dict[str, type[Operator]] = {
    "RemoveMethod": RemoveMethod,
    "OppositeName": OppositeName,
    "SwapBranches": SwapBranches,
    "DropOperand": DropOperand,
}


@functools.cache
def operators() -> dict[str, Operator]:
    """Every operator that is used, by name."""
    library = OperatorProvider()
    chosen = {name: library[name]() for name in LIBRARY}
    return chosen | {name: operator() for name, operator in OURS.items()}


def parse(source: str) -> Node:
    return parso.parse(source)
