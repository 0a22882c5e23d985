"""Objects that Python gives, as bytes for a worker and back."""

from __future__ import annotations

import base64
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

from oxrl.usercode.given import take
from oxrl.usercode.messages import Json

# Largest object that is sent to a worker, in bytes: a larger one holds data, and every worker
# would hold a copy of it.
MOST_SENT = 1 << 26


def packed(value: object) -> Json | None:
    """Pack an object so that a worker can make the same; None where it cannot leave this process.

    A module that a worker would not find is sent with it: what lies in `__main__`, in a notebook,
    or in a file that was loaded by its path.
    """
    import cloudpickle  # a tenth of a second, which only this costs

    module = sys.modules.get(getattr(value, "__module__", None) or "")
    apart = module is not None and not _importable(module)
    try:
        if module is not None and apart:
            cloudpickle.register_pickle_by_value(module)
        try:
            data = cloudpickle.dumps(value)
        finally:
            if module is not None and apart:
                cloudpickle.unregister_pickle_by_value(module)
    except Exception:  # noqa: BLE001 - whatever the user's objects raise, they stay here
        return None
    if len(data) > MOST_SENT:
        return None
    # A worker has the folders of this process to import from, but for the current one.
    paths = [os.getcwd()] if "" in sys.path else []
    return {"data": base64.b64encode(data).decode("ascii"), "paths": paths}


def unpacked(message: Json) -> Any:
    """Unpack what `packed` made a message of.

    Raises:
        Exception: whatever importing the modules that it needs raises.
    """
    import cloudpickle

    sys.path += [path for path in message["paths"] if path not in sys.path]
    return cloudpickle.loads(base64.b64decode(message["data"]))


def _importable(module: ModuleType) -> bool:
    """True if a fresh process finds the module by its name, in the same place."""
    if module.__name__ == "__main__":
        return True  # cloudpickle sends what lies there of its own accord
    top = module.__name__.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return True
    loaded = sys.modules.get(top)
    found = importlib.machinery.PathFinder.find_spec(top)
    if loaded is None or found is None:
        return False
    return found.origin == getattr(loaded, "__file__", None)


def receive(name: str, message: Json) -> None:
    """In a worker: take what its parent packed, under its name.

    Raises:
        Exception: whatever importing the modules that it needs raises.
    """
    take(name, unpacked(message))
