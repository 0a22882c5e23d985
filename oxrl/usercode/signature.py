"""The parameters of a user's function, read from the function itself or from its source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from oxrl.types import Names, Objects, Values


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The parameters of a function.

    by_place: names of what may be given by its place, in order. by_name: of what may only be given
    by its name. needed: those without a default. any_place, any_name: it has *, or **.
    place_only: it has some that cannot be given by their names.
    """

    by_place: Names
    by_name: Names
    needed: frozenset[str]
    any_place: bool = False
    any_name: bool = False
    place_only: bool = False

    @property
    def names(self) -> Names:
        """All parameters, in the order of the function."""
        return (*self.by_place, *self.by_name)

    def has(self, name: str) -> bool:
        """True if a parameter is called that.

        Args:
            name: without an underscore in front.
        """
        return any(_plain(own) == name for own in self.names)

    def needs_beside(self, names: Names) -> Names:
        """List the parameters that a caller would have to pass beside those that it can.

        Args:
            names: that a caller can pass.

        Returns:
            Parameters without a default that are none of `names`, in the order of the function.
        """
        needed = [_plain(name) for name in self.names if name in self.needed]
        return tuple(name for name in needed if name not in names)

    def taken_of(self, values: Objects) -> Values:
        """Choose the values that the function takes, by the names that it has for them.

        Args:
            values: by name, without an underscore in front.

        Returns:
            Keyword arguments; all of `values` where the function takes `**kwargs`.
        """
        own = {_plain(name): name for name in self.names}
        accepted: Values = {}
        for name, value in values.items():
            if name in own:
                accepted[own[name]] = value
            elif self.any_name:
                accepted[name] = value
        return accepted


def signature_of(function: Callable[..., Any]) -> Signature:
    """The signature of a function.

    Args:
        function: anything that can be called.

    Raises:
        TypeError, ValueError: it has none, being compiled, or none that makes sense.
    """
    parameters = inspect.signature(function).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    placed = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    by_place = tuple(p.name for p in parameters if p.kind in placed)
    by_name = tuple(p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY)
    needed = frozenset(p.name for p in parameters if p.default is Parameter.empty)
    return Signature(
        by_place=by_place,
        by_name=by_name,
        needed=needed,
        any_place=Parameter.VAR_POSITIONAL in kinds,
        any_name=Parameter.VAR_KEYWORD in kinds,
        place_only=Parameter.POSITIONAL_ONLY in kinds,
    )


def signature_in(source: ast.FunctionDef) -> Signature:
    """The signature of a function that was not run.

    Args:
        source: its definition.
    """
    taken = source.args
    by_place = tuple(argument.arg for argument in (*taken.posonlyargs, *taken.args))
    by_name = tuple(argument.arg for argument in taken.kwonlyargs)
    needed = set(by_place[: len(by_place) - len(taken.defaults)])
    for name, default in zip(by_name, taken.kw_defaults, strict=True):
        if default is None:
            needed.add(name)
    return Signature(
        by_place=by_place,
        by_name=by_name,
        needed=frozenset(needed),
        any_place=taken.vararg is not None,
        any_name=taken.kwarg is not None,
        place_only=bool(taken.posonlyargs),
    )


def _plain(name: str) -> str:
    """`_prompt` is a prompt that is not used, and so is `_`."""
    return name.lstrip("_") or "prompt"
