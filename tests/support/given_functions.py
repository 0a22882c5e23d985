"""Rewards and an environment that tests give to `oxrl.train` from Python.

Workers find them by their module and import it: here, where it costs them nothing else.
"""

from __future__ import annotations

from typing import Any

from oxrl.environments import Step


def digits(prompt: Any, completion: str) -> float:
    return sum(map(str.isdigit, completion[:6])) / 6


def longer(prompt: Any, completion: str) -> float:
    return len(completion)


class Once:
    def reset(self, prompt: Any, seed: int) -> Any:
        return prompt.messages

    def step(self, text: str) -> Step:
        return Step(reward=digits(None, text), terminated=True)
