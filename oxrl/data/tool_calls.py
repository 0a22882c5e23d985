"""Calls of tools in what a model wrote, in the formats of the usual chat templates.

<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>     Hermes, Qwen
{"name": "add", "parameters": {"a": 1, "b": 2}}                           Llama 3, alone
<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}             Llama 3
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from oxrl.types import Named

TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
# What holds the arguments, by format.
ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class ToolCall:
    """A call that can be made."""

    name: str
    arguments: Named


@dataclass(frozen=True)
class BrokenCall:
    """Text that was meant as a call and is none; `problem` says why, to the model."""

    problem: str


def find_calls(text: str) -> list[ToolCall | BrokenCall]:
    """Find the calls in a text, in order; empty where it calls nothing.

    Args:
        text: what the model wrote in a turn.

    Returns:
        A `BrokenCall` where something looks like a call and is none.
    """
    tagged = TAGGED.findall(text)
    if tagged:
        return [read_call(part) for part in tagged]
    bare = text.strip()
    if bare.startswith(PYTHON_TAG):
        return [read_call(bare.removeprefix(PYTHON_TAG))]
    if bare.startswith("{") and '"name"' in bare:
        return [read_call(bare)]
    return []


def read_call(text: str) -> ToolCall | BrokenCall:
    """Read one call from its JSON.

    Args:
        text: JSON of an object with `name`, and `arguments` or `parameters`.

    Returns:
        The call; or what is wrong with it, in words for the model.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BrokenCall(f"the call is no JSON: {error}")
    if not isinstance(fields, dict):
        return BrokenCall("the call is no JSON object")
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        return BrokenCall('the call has no "name"')
    given = [fields[key] for key in ARGUMENTS if key in fields]
    arguments = given[0] if given else {}
    if isinstance(arguments, str):  # some templates quote the object once more
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return BrokenCall(f"the arguments of {name} are no JSON: {error}")
    if not isinstance(arguments, dict):
        return BrokenCall(f"the arguments of {name} are no JSON object")
    return ToolCall(name, arguments)
