"""Functions that score completions, and the killable workers they run in. Imports no torch: workers
start fast. The functions are imported when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oxrl.rewards.code import code_reward
    from oxrl.rewards.exact import exact_reward
    from oxrl.rewards.math import math_reward

__all__ = ["code_reward", "exact_reward", "math_reward"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'oxrl.rewards' has no attribute {name!r}")
    return getattr(import_module(f"oxrl.rewards.{name.removesuffix('_reward')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
