"""Tool-call reward: a response has to call the right tools with the right arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from oxrl.rewards.builtin import BuiltIn
from oxrl.types import Named, Score

Call = tuple[str, Any]
_TAGGED = re.compile(r"<(tool_call|functioncall|function_call)>(.*?)(?:</\1>|$)", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)(?:```|$)", re.DOTALL)


def tool_call_reward(response: str, answer: object) -> Score:
    """Score 1 if a response makes exactly the calls in `answer`, in their order, else 0.

    Calls are JSON objects with `name` and `arguments`: between `<tool_call>` tags, in fenced
    blocks, or the whole response after any `</think>`; one of a list, or several. Arguments are
    compared as JSON: the order of keys is nothing, 1 equals 1.0, and true is no number.

    Args:
        response: the text that the model wrote.
        answer: one call or a list of them, as mappings or as JSON text; also in the layout of chat
            messages, `{"function": {"name", "arguments"}}`, whose arguments may be JSON text.

    Returns:
        Value 1.0, or 0.0 with a reason; status "invalid" if `answer` holds no call.
    """
    try:
        wanted = calls_of(json.loads(answer) if isinstance(answer, str) else answer)
    except ValueError as error:
        return Score(value=None, status="invalid", reason=f"toolcall: the answer {error}")
    try:
        found = calls_in(response)
    except ValueError as error:
        return Score(value=0.0, reason=f"the response {error}")
    if len(found) != len(wanted):
        return Score(value=0.0, reason=f"{len(found)} calls, expected {len(wanted)}")
    for (name, arguments), (right, needed) in zip(found, wanted, strict=True):
        if name != right:
            return Score(value=0.0, reason=f"calls {name[:80]!r}, expected {right[:80]!r}")
        if not same(arguments, needed):
            reason = (
                f"{name} with {json.dumps(arguments)[:120]}, expected {json.dumps(needed)[:120]}"
            )
            return Score(value=0.0, reason=reason)
    return Score(value=1.0)


def calls_in(response: str) -> list[Call]:
    """The calls that a response makes: in tags, else in fenced blocks, else as the whole text.

    Args:
        response: the text that the model wrote; what it thinks before `</think>` is not read.

    Returns:
        Name and arguments of each, in order.

    Raises:
        ValueError: it makes none, or what looks like one is none.
    """
    text = response.rpartition("</think>")[2]
    pieces = [piece for _, piece in _TAGGED.findall(text)] or _FENCED.findall(text) or [text]
    calls: list[Call] = []
    for piece in pieces:
        try:
            calls += calls_of(json.loads(piece))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"holds no call: {error}") from error
    return calls


def calls_of(data: object) -> list[Call]:
    """Calls out of JSON values.

    Args:
        data: a call, `{"name", "arguments"}` or `{"function": {...}}`, arguments a mapping or JSON
            of one; or a list of calls.

    Returns:
        Name and arguments of each, in order, at least one.

    Raises:
        ValueError: they are none.
    """
    if isinstance(data, list):
        calls = [call for item in data for call in calls_of(item)]
        if not calls:
            raise ValueError("is an empty list")
        return calls
    fields: Named = data if isinstance(data, Mapping) else {}
    if isinstance(fields.get("function"), Mapping):
        fields = fields["function"]
    name = fields.get("name")
    arguments = fields.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError('needs "name", a text, and "arguments", a mapping')
    return [(name, arguments)]


def same(one: object, other: object) -> bool:
    """True if two JSON values are equal: lists in order, mappings in any; True is not 1, but 1 is
    1.0.

    Args:
        one, other: as `json.loads` returns them.
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


TOOL_CALL = BuiltIn(tool_call_reward)
