"""Rewards: functions that score completions, and the killable workers they run in.

The interface is `reward(prompt, completions) -> list[Score]`, sync or async, over the completions
of one prompt. Users need not write that: `reward.name: my_reward.py:score` may also name a function
of one sample,

    def score(prompt: Prompt, completion: str) -> float:      # prompt.answer is the ground truth
        return 1.0 if completion.strip() == prompt.answer else 0.0

What a function gets is told by the names of its parameters (`call_forms.py`): `completion` is one
text, `completions` are those of the group, and rewards written for verl or TRL are called as these
libraries would. A float, an int, a bool, a scalar tensor or a `Score` may be returned, which also
says what it is made of and which steps of the text earned it. A failure is never the number 0: an
exception becomes status "error", a value that is no finite number status "invalid", each with a
reason.

The functions here are imported when they are asked for. Nothing imports torch: workers start fast.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from oxrl.entry_points import own_offers

if TYPE_CHECKING:
    from oxrl.types import Score

    # Of a response and its ground truth; `code_reward` has options too.
    math_reward: Callable[[str, object], Score]
    exact_reward: Callable[[str, object], Score]
    code_reward: Callable[..., Score]

__all__ = ["code_reward", "exact_reward", "math_reward"]


def __getattr__(name: str) -> Any:
    place = own_offers("oxrl.rewards").get(name.removesuffix("_reward"))
    if name not in __all__ or place is None:
        raise AttributeError(f"module 'oxrl.rewards' has no attribute {name!r}")
    return getattr(import_module(place.partition(":")[0]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
