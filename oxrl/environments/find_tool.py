"""Tools by name: those of packages, with options of their own, and functions in a file.

options:
  tools:
    - calculator
    - {name: python, sandbox: strict}
    - {name: search, file: passages.jsonl, top: 3}
    - shop.py:price
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

from oxrl.errors import did_you_mean
from oxrl.tables.user_code import TOOL
from oxrl.usercode.locate import place_of
from oxrl.usercode.user_code import run_module

# A name, or `name` with options.
ToolSpec = str | Mapping[str, Any]


class NamedTool(Protocol):
    """A tool that needs more than a call.

    function: what the policy calls.
    """

    @property
    def function(self) -> Callable[..., object]:
        """The function that the policy calls: its parameters have types, its docstring is for the
        policy.
        """
        ...

    def check(self) -> None:
        """Make sure that it can work, and load what all episodes share.

        Raises:
            ValueError: it cannot; says what to do.
        """
        ...


@runtime_checkable
class ClosingTool(Protocol):
    """A tool that holds something to the end of an episode."""

    def close(self) -> None:
        """Give it back."""
        ...


class FunctionTool(NamedTuple):
    """A function of a user's, with types at its parameters, which needs nothing but a call."""

    function: Callable[..., object]

    def check(self) -> None:
        """Nothing to make sure of."""


def find_tool(spec: ToolSpec) -> NamedTool:
    """A tool by its name and options.

    Args:
        spec: a name, or a mapping with `name` and options.

    Returns:
        The tool; whether it can work here, its `check` says.

    Raises:
        ValueError: there is none, or it does not take these options; says what to write.
    """
    options: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"a tool is a name, or {{name: NAME, OPTION: VALUE}}, not {spec!r}")
    try:
        place = place_of(TOOL, name)
    except ValueError as error:
        raise ValueError(f"the tool {name!r}: {error}") from error
    if place.module:
        made = getattr(import_module(place.module), place.name)
        known = inspect.signature(made).parameters
        for option in options:
            if option not in known:
                takes = ", ".join(known) or "no option"
                hint = did_you_mean(option, known)
                raise ValueError(f"the tool {name} takes {takes}, not {option!r}{hint}")
        return made(**options)
    if options:
        raise ValueError(f"the tool {name!r} is a function, which takes no {', '.join(options)}")
    assert place.file is not None
    function = getattr(run_module(place.file, TOOL.noun), place.name)
    if not callable(function):
        raise ValueError(f"the tool {name!r} is no function, but {type(function).__name__}")
    return FunctionTool(function)
