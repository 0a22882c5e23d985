"""Tools: plain typed functions that the policy may call before it answers.

    environment:
      name: tools
      options: {tools: [calculator, "my_tools.py:weather"], max_calls: 4}

A turn that calls tools gets their results as messages of role `tool`; a turn that calls none is the
answer, which the run's reward scores. A class of one's own inherits from `ToolEnvironment` and
marks methods with `@tool`; it keeps what its tools need in `self`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from oxrl.data.tool_calls import BrokenCall, ToolCall, find_calls
from oxrl.environments.find_tool import ClosingTool, NamedTool, ToolSpec, find_tool
from oxrl.environments.typed_tool import Tool, ToolFailure, as_tool
from oxrl.errors import did_you_mean
from oxrl.tables.user_code import TOOL
from oxrl.types import Values
from oxrl.usercode.environments import Environment, Message, Step, is_tool
from oxrl.usercode.locate import forms_of


class ToolEnvironment(Environment):
    """One task with tools: calls are answered until a turn calls none.

    Args:
        tools: what `find_tool` takes.
        max_calls: after which the episode is cut.
        made_tools: further ones.
    """

    def __init__(
        self,
        tools: Sequence[ToolSpec] = (),
        max_calls: int = 16,
        made_tools: Sequence[Tool] = (),
    ) -> None:
        self.calls = 0
        self.failures = 0
        self._max_calls = max_calls
        found = find_tools(tools)
        functions = [each.function for each in found]
        for name, method in inspect.getmembers(self, callable):
            if not name.startswith("__") and is_tool(method):
                functions.append(method)
        made_tools = [*made_tools, *map(as_tool, functions)]
        self._tools = {made.name: made for made in made_tools}
        if not self._tools:
            raise ValueError(
                "there is no tool: name some in environment.options.tools "
                f"({forms_of(TOOL)}), or mark methods with @tool"
            )
        closing = [each.close for each in found if isinstance(each, ClosingTool)]
        if closing and not hasattr(self, "close"):
            self.close = partial(_call_all, closing)

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """See `Environment.prepare`: make sure of the tools, and load what episodes share.

        Args:
            options: of the class; `tools` is looked at.

        Raises:
            ValueError: a tool cannot work; says what to do.
        """
        for found in find_tools(options.get("tools", ())):
            found.check()

    @property
    def tools(self) -> list[Values]:
        """JSON schemas of the tools, for the chat template."""
        return [made.schema for made in self._tools.values()]

    def step(self, text: str) -> Step:
        """Answer the calls of a turn; without any it was the answer."""
        calls = find_calls(text)
        if not calls:
            return Step(terminated=True)
        messages: list[Message] = []
        for call in calls:
            if self.calls >= self._max_calls:
                return Step(messages, truncated=True, reason="max_tool_calls")
            self.calls += 1
            messages.append({"role": "tool", "content": self.result(call)})
        failed = f", {self.failures} failed" if self.failures else ""
        return Step(messages, reason=f"{self.calls} calls{failed}")

    def result(self, call: ToolCall | BrokenCall) -> str:
        """Run one call and return its result; a mistake is told as text, and counted.

        Args:
            call: of a tool, or what is wrong with one.

        Returns:
            A text, which begins with "error: " where it failed.

        Raises:
            ToolUnavailable: what the tool needs is not there: the episode has no score.
        """
        try:
            if isinstance(call, BrokenCall):
                raise ToolFailure(call.problem)
            made = self._tools.get(call.name)
            if made is None:
                hint = did_you_mean(call.name, self._tools)
                known = ", ".join(self._tools)
                raise ToolFailure(f"there is no tool {call.name!r}, only {known}{hint}")
            return made.call(call.arguments)
        except ToolFailure as failure:
            self.failures += 1
            return f"error: {failure}"


def find_tools(specs: Sequence[ToolSpec]) -> list[NamedTool]:
    """The tools of a list.

    Args:
        specs: `environment.options.tools`.

    Returns:
        As many, in their order.

    Raises:
        ValueError: it is no list, or one of them cannot be had; says what to write.
    """
    if isinstance(specs, str) or not isinstance(specs, Sequence):
        raise ValueError(f"environment.options.tools must be a list, such as [{specs}]")
    return [find_tool(spec) for spec in specs]


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
