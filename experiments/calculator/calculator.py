"""A product that the policy cannot work out, a tool that can, and one that cannot."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from oxrl.environments import Step
from oxrl.types import Prompt
from oxrl_envs.calculator import calculator

CALL = re.compile(r"<(\d+\*\d+)>")
Messages = Sequence[dict[str, str]]


class Calculator:
    """Asks for a product. `<448*89>` calls the tool; any other text is the answer."""

    reusable = True  # one process plays episode after episode

    def reset(self, prompt: Prompt, seed: int) -> Messages:
        """The question, as the data has it."""
        self.answer = str(prompt.answer)
        self.chance = random.Random(seed)
        return list(prompt.messages)

    def step(self, text: str) -> Step:
        """The result of a call, or the end."""
        call = CALL.fullmatch(text.strip())
        if call is None:
            return Step(reward=float(text.strip() == self.answer), terminated=True)
        return Step([{"role": "user", "content": self.result(call[1])}])

    def result(self, expression: str) -> str:
        """What the tool says; a number with a leading zero is none."""
        try:
            return calculator(expression)
        except ValueError:
            return "?"


class Broken(Calculator):
    """The control for use of the tool: it says another number of as many digits."""

    def result(self, expression: str) -> str:
        """Some number."""
        digits = len(super().result(expression))
        return str(self.chance.randrange(10 ** (digits - 1), 10**digits))
