"""Objects whose public typed methods are tools, as TRL's `environment_factory` takes them.

    class Counter:
        def reset(self, **row):              # the columns of the row of data
            self.count = 0

        def increment(self, step: int) -> int:
            '''Count up.'''
            self.count += step
            return self.count

`reset` may return a text, which is put behind the last message. A method `get_reward`, if there is
one, is asked once at the end what the episode is worth. Without it an attribute `reward` says so:
what it gained in a turn is the reward of that turn. Methods may be `async`.

Source: TRL's documentation of GRPOTrainer, "Agent Training", sections Environments and Rewards.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, cast

from oxrl.environments.adapting import with_text
from oxrl.environments.tool_environment import ToolEnvironment
from oxrl.environments.typed_tool import as_tool
from oxrl.types import Prompt
from oxrl.usercode.environments import Message, Step, tool_names
from oxrl.usercode.user_code import awaited


class ObjectTools(ToolEnvironment):
    """An environment around an object of a class without `step`.

    Args:
        made: the class.
        max_calls: after which the episode is cut.
        options: what the class is called with.
    """

    def __init__(self, made: type, max_calls: int = 16, **options: Any) -> None:
        self._object = made(**options)
        self._worth = 0.0
        tools = [as_tool(getattr(self._object, name)) for name in tool_names(made)]
        super().__init__(made_tools=tools, max_calls=max_calls)
        if callable(getattr(self._object, "close", None)):
            self.close = self._object.close

    def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        """Hand the row of data to the object's own `reset`, as far as that takes it."""
        row = {"prompt": list(prompt.messages), "answer": prompt.answer}
        given = {**row, **prompt.metadata, "seed": seed}
        parameters = inspect.signature(self._object.reset).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            names = [parameter.name for parameter in parameters]
            given = {name: value for name, value in given.items() if name in names}
        text = awaited(self._object.reset(**given))
        if not isinstance(text, str | None):
            raise ValueError(f"reset gave {type(text).__name__}, need a text or None")
        return with_text(prompt.messages, text or "")

    def step(self, text: str) -> Step:
        """Answer calls, and say what the object's worth has gained."""
        step = super().step(text)
        reward = self._gained(over=step.terminated or step.truncated)
        return replace(step, reward=reward)

    def worth_when_cut(self) -> float:
        """See `Environment`: an object with `get_reward` is asked at every end."""
        return self._gained(over=True)

    def _gained(self, *, over: bool) -> float:
        judge = getattr(self._object, "get_reward", None)
        if callable(judge):
            return float(cast(Any, awaited(judge()))) if over else 0.0
        attribute = getattr(self._object, "reward", None)
        worth = 0.0 if attribute is None or callable(attribute) else float(attribute)
        gained = worth - self._worth
        self._worth = worth
        return gained
