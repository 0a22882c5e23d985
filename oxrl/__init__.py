"""oxRL: readable, provable post-training of language models.

`oxrl.train`, `oxrl.load_run` and `oxrl.report` are the command line for Python; see docs/python.md.
They are imported when they are asked for: `import oxrl` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oxrl import report
    from oxrl.api import Run, load_run, train

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "load_run", "report", "train"]


def __getattr__(name: str) -> Any:
    if name == "report":
        return import_module("oxrl.report")
    if name in __all__:
        return getattr(import_module("oxrl.api"), name)
    raise AttributeError(f"module 'oxrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
