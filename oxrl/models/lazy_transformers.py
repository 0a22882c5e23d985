"""transformers' model classes without the libraries that only other uses of them need.

Importing `PreTrainedModel` makes transformers import scikit-learn, SciPy and with them pandas and
pyarrow, wherever they are installed, for two functions: one scores assisted generation, the other
matches boxes of object detectors. That is a fifth of the time until a run's first step. Here the
two functions stand in their own place until they are called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

# Module -> function of it that transformers imports at the top of its files.
LATER = {
    "sklearn.metrics": "roc_curve",
    "scipy.optimize": "linear_sum_assignment",
}


def import_model_classes() -> None:
    """Import what every model of transformers is made of; what it imports stays imported."""
    with called_later(LATER):
        import_module("transformers.generation.utils")
        import_module("transformers.modeling_utils")


@contextmanager
def called_later(functions: dict[str, str]) -> Iterator[None]:
    """Put off `from MODULE import FUNCTION` inside the block: the first call imports.

    Args:
        functions: module -> function. Modules that are imported already stay as they are; what
            else is asked of one that is not comes from the real module.
    """
    waiting: list[str] = []
    for module, function in functions.items():
        if module not in sys.modules:
            sys.modules[module] = _Waiting(module, function)
            waiting.append(module)
    try:
        yield
    finally:
        for module in waiting:
            if isinstance(sys.modules.get(module), _Waiting):
                del sys.modules[module]


class _Waiting(ModuleType):
    """Stands for a module that is not imported, with one function of it, whose call imports it."""

    def __init__(self, name: str, function: str) -> None:
        super().__init__(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(name), function)(*args, **kwargs)

        setattr(self, function, call)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)
