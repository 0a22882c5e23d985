"""Pure maths: tensors in, tensors out. No config, no I/O, no devices, no randomness, nothing
heavier than torch.

A formula belongs here when it has an equation; whatever needs a model, a file or a setting does
not. The public names stand in public.py, which is imported when one of them is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oxrl.functional.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    import oxrl.functional.public as public  # the core asks for no name here

    names = [known for known in vars(public) if not known.startswith("_")]
    if name == "__all__":
        return names
    if name in names:
        return getattr(public, name)
    raise AttributeError(f"module 'oxrl.functional' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __getattr__("__all__")
