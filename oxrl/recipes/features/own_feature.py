"""Features of the user's own, `train.features`: classes of a file, or given to `oxrl.train`.

A feature changes the loop at the hooks of `oxrl.recipes.features.base.Feature`. What a hook of the
user's raises or returns wrongly is told in words, with its file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from oxrl.checkpoint import Saved
from oxrl.errors import did_you_mean
from oxrl.functional.group_advantages import AdvantageInputs
from oxrl.recipes.features.base import Feature, FeatureInputs, Planned
from oxrl.tables.numbers import Value
from oxrl.tables.user_code import FEATURE
from oxrl.types import PolicyBatch, RolloutBatch
from oxrl.usercode.find import UserCode, find

WANTED = (
    "a feature is a class with oxrl.recipes.features.base.Feature as its base that overrides some "
    "of its hooks; docs/extend.md has one"
)
# Hook -> what it has to return.
RETURNS: Mapping[str, tuple[type, ...]] = {
    "on_assembled": (type(None),),
    "on_sampled": (type(None),),
    "on_rollouts": (RolloutBatch,),
    "on_advantage_inputs": (AdvantageInputs,),
    "on_prepared": (PolicyBatch,),
    "steer": (dict,),
    "on_minibatch": (PolicyBatch,),
    "loss": (tuple, type(None)),
    "add_gradients": (dict, type(None)),
    "holds_policy": (bool,),
    "optim_step": (dict,),
    "after_updates": (type(None),),
    "measure": (dict,),
}
SETTINGS = tuple(name for name in Feature.__annotations__ if name not in RETURNS)


def find_feature(name: str) -> UserCode:
    """Find a feature's class, or what makes one, without making it.

    Raises:
        ConfigError: there is none, or it can be no feature; says what to change.
    """
    code = find(FEATURE, name)
    made = code.value
    if isinstance(made, Feature):
        kind = type(made).__name__
        raise code.problem(f"it is an object of {kind}: give the class, which the run makes one of")
    if not callable(made):
        raise code.problem(f"{type(made).__name__} is no class: {WANTED}")
    if isinstance(made, type):
        problem = _why_no_feature(made)
        if problem:
            raise code.problem(f"{problem}: {WANTED}")
    return code


def _why_no_feature(made: type) -> str:
    """Say why a class can be no feature; empty if it can."""
    if not issubclass(made, Feature):
        return f"{made.__name__} has not Feature as its base"
    known = (*RETURNS, *SETTINGS)
    own = [name for name in dir(made) if name not in dir(Feature) and name.startswith("on_")]
    if own:
        return f"{made.__name__} has {own[0]}, which is no hook{did_you_mean(own[0], known)}"
    if not any(getattr(made, name) is not getattr(Feature, name) for name in known):
        return f"{made.__name__} overrides none of {', '.join(known)}"
    return ""


def tried_features(features: Mapping[str, Mapping[str, Value]], run: Planned) -> str:
    """Find every feature of a run; what was done, and what they cost, in words.

    Args:
        features: `train.features`.
        run: what is known of it.

    Raises:
        ConfigError: what is wrong with one.
    """
    told: list[str] = []
    for name, numbers in features.items():
        found = find_feature(name)
        known = isinstance(found.value, type)
        costs = found.call(found.value.planned, run, numbers) if known else ""
        told.append(f"{name} ({costs})" if costs else name)
    return f"{', '.join(told)}: made when a run starts"


class OwnFeature(Feature):
    """A feature of the user's, and what its hooks return looked at.

    Args:
        name: in `train.features`.
        given: what features are built from.
        numbers: of `train.features`, which its class gets by their names.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self, name: str, given: FeatureInputs, numbers: Mapping[str, Value]) -> None:
        found = find_feature(name)
        made = found.call(found.value, given, **numbers)
        if not isinstance(made, Feature):
            raise found.problem(f"it made {type(made).__name__}: {WANTED}")
        self._name = name
        self._code = found._replace(value=made)
        self._take_settings()

    def _take_settings(self) -> None:
        made: Feature = self._code.value
        for name in SETTINGS:
            setattr(self, name, getattr(made, name))

    def saved(self) -> dict[str, Saved]:
        """Return what it keeps over a resume, if it has `save` and `load`."""
        made = self._code.value
        if not (hasattr(made, "save") and hasattr(made, "load")):
            return {}
        return {f"feature_{self._name.rpartition(':')[2]}": self}

    def save(self, directory: Path) -> None:
        """Have the feature write what it needs to go on."""
        directory.mkdir(parents=True, exist_ok=True)
        self._code.call(self._code.value.save, directory)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        self._code.call(self._code.value.load, directory)

    def ask(self, hook: str, *args: Any, **named: Any) -> Any:
        """Call a hook of the user's.

        Args:
            hook: its name.
            args, named: what it is called with.

        Returns:
            What it gave, which is of the kind that `RETURNS` says.

        Raises:
            ConfigError: it raised something, or gave something else.
        """
        found = self._code.call(getattr(self._code.value, hook), *args, **named)
        kinds = RETURNS[hook]
        if not isinstance(found, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds).replace("NoneType", "None")
            raise self._code.problem(f"{hook} gave {type(found).__name__}, has to give {wanted}")
        if hook == "loss" and found is not None and not _is_term(found):
            raise self._code.problem("loss has to give a scalar tensor and a dict of metrics")
        return found

    def __getstate__(self) -> Any:
        return (self._name, self._code)

    def __setstate__(self, state: Any) -> None:
        self._name, self._code = state
        self._take_settings()


def _is_term(found: tuple[Any, ...]) -> bool:
    """True of a scalar tensor and a dict, which a term of the loss is."""
    if len(found) != 2 or not isinstance(found[0], Tensor):
        return False
    return not found[0].dim() and isinstance(found[1], dict)


def _asks(hook: str) -> Callable[..., Any]:
    """Make the method of a hook, which asks the user's."""

    def method(self: OwnFeature, *args: Any, **named: Any) -> Any:
        return self.ask(hook, *args, **named)

    return method


for _hook in RETURNS:
    setattr(OwnFeature, _hook, _asks(_hook))
