"""A typed function that the policy may call: its schema, checked arguments, a result as text."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from oxrl.types import Named, Values
from oxrl.usercode.environments import ToolUnavailable
from oxrl.usercode.user_code import MOST_REASON, awaited, capped

# Longest result of a tool that the policy reads, in characters.
MOST_RESULT = 4000
# Where a docstring begins to describe arguments, and a line of that: `name: text`.
_ARGUMENTS = re.compile(r"^\s*(Args|Arguments|Parameters):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class ToolFailure(Exception):
    """A call came to nothing; the text is for the model."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call, and what its arguments have to be."""

    name: str
    description: str
    function: Callable[..., object]
    arguments: type[BaseModel]

    @property
    def schema(self) -> Values:
        """The JSON schema that chat templates show of it."""
        parameters = self.arguments.model_json_schema()
        parameters.pop("title", None)
        described = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": described}

    def call(self, arguments: Named) -> str:
        """The result as text.

        Args:
            arguments: by name, as JSON has them; they are checked, and made what the types say.

        Returns:
            Its own text, or JSON of what it returned, at most MOST_RESULT characters.

        Raises:
            ToolFailure: the arguments do not fit, or the function raised.
            ToolUnavailable: the function said so.
        """
        try:
            given = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ToolFailure(f"wrong arguments of {self.name}: {'; '.join(problems)}") from error
        values = {name: getattr(given, name) for name in type(given).model_fields}
        try:
            result = awaited(self.function(**values))
        except (ToolFailure, ToolUnavailable):
            raise
        except Exception as error:  # the model is told, as text
            why = capped(str(error), MOST_REASON)
            raise ToolFailure(f"{self.name} raised {type(error).__name__}: {why}") from error
        if isinstance(result, str):
            return capped(result, MOST_RESULT)
        return capped(json.dumps(result, default=str, ensure_ascii=False), MOST_RESULT)


def as_tool(function: Callable[..., object]) -> Tool:
    """A typed function as a tool; what its docstring says of arguments goes into the schema.

    Args:
        function: whose parameters have types; its docstring's first paragraph is the description.

    Returns:
        The tool, under the function's name.

    Raises:
        TypeError: a parameter has no type, or takes any number of values.
    """
    name = getattr(function, "__name__", type(function).__name__)
    text = inspect.getdoc(function) or ""
    described = argument_texts(text)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the tool {name} takes {parameter}, need parameters with names")
        if parameter.annotation is parameter.empty:
            raise TypeError(f"the tool {name} has no type for {parameter.name!r}")
        missing = parameter.default is parameter.empty
        default = Field(
            default=... if missing else parameter.default,
            description=described.get(parameter.name),
        )
        fields[parameter.name] = (parameter.annotation, default)
    arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    return Tool(name, text.partition("\n\n")[0], function, arguments)


def argument_texts(docstring: str) -> dict[str, str]:
    """Read what a docstring in Google's style says of each argument; empty where it says nothing.

    Args:
        docstring: with its indentation cleaned.

    Returns:
        Name -> description, on one line.
    """
    found: dict[str, str] = {}
    begins = _ARGUMENTS.search(docstring)
    if begins is None:
        return found
    depth = ""
    name = ""
    for line in docstring[begins.end() :].splitlines():
        if not line.strip():
            continue
        if not line[0].isspace():
            break
        argument = _ARGUMENT.match(line)
        if argument and (not found or argument[1] == depth):
            depth = argument[1]
            name = argument[2]
            found[name] = argument[3].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
