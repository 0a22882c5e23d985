"""Runs first in every Python process of `make test-processors`, those that tests start included.

Notes which tests train, shakes what they train, and chooses the products of `oxrl/models/linear.py`;
no test needs to know.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PER_WEIGHT = "oxrl.engines.train.per_weight_optimizers"
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


def _shake_weights(module: ModuleType) -> None:
    # It imports torch, which has to come first.
    from processors.rounding_noise import watch_optimizers

    watch_optimizers(module)


def _shake_each_weight(module: ModuleType) -> None:
    from processors.rounding_noise import watch_per_weight_optimizers

    watch_per_weight_optimizers(module)


class _After(MetaPathFinder):
    """Calls functions with a module as soon as it was imported.

    Args:
        calls: by the module's name.
    """

    def __init__(self, calls: Mapping[str, Sequence[Callable[[ModuleType], None]]]) -> None:
        self._calls = calls

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._calls:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            for call in self._calls[fullname]:
                call(module)

        spec.loader.exec_module = executed
        return spec


_calls: dict[str, list[Callable[[ModuleType], None]]] = {}
for _variable, _module, _call in (
    ("OXRL_TEST_TRAINED", "torch.optim.optimizer", _watch_optimizers),
    ("OXRL_TEST_NOISE", "torch.optim.optimizer", _shake_weights),
    ("OXRL_TEST_NOISE", PER_WEIGHT, _shake_each_weight),
    ("OXRL_TEST_PRODUCTS", "oxrl.models.linear", _choose_products),
):
    if _variable in os.environ:
        _calls.setdefault(_module, []).append(_call)
if _calls:
    sys.meta_path.insert(0, _After(_calls))
