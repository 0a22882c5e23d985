"""Runs first in every Python process of `make test-processors`, those that tests start included.

Notes which tests train, and chooses the products of `oxrl/models/linear.py`; no test needs to know.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_noted: set[str] = set()


def _note_training(*_: Any) -> None:
    """An optimizer made a step: write down for which test, and in which phase of it."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if test not in _noted:
        _noted.add(test)
        with open(os.environ["OXRL_TEST_TRAINED"], "a") as file:
            file.write(test + "\n")


def _watch_optimizers(module: ModuleType) -> None:
    module.register_optimizer_step_post_hook(_note_training)


def _choose_products(module: ModuleType) -> None:
    chosen = os.environ["OXRL_TEST_PRODUCTS"]
    module.onednn_is_faster = lambda: chosen != "off"
    if chosen == "all":
        module.SMALL = 0


class _After(MetaPathFinder):
    """Calls a function with a module as soon as it was imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = executed
        return spec


if "OXRL_TEST_TRAINED" in os.environ:
    sys.meta_path.insert(0, _After("torch.optim.optimizer", _watch_optimizers))
if "OXRL_TEST_PRODUCTS" in os.environ:
    sys.meta_path.insert(0, _After("oxrl.models.linear", _choose_products))
