"""Notices that a reward has changed what other samples' scores are computed with.

A reward may run text that a model wrote in its own process, and that text may replace
`math.isclose` or `builtins.len`. The next sample in that process would then be scored by the
replacement, with status ok. So after every call the functions, classes and modules that scoring
commonly uses are compared with what they were, by identity. This is no sandbox: code that wants to
hide can.
"""

from __future__ import annotations

import decimal
import os
import subprocess  # noqa: F401 - to be watched: a reward may import it when it scores
import sys
from types import ModuleType

from oxrl.entry_points import OURS, own_offers
from oxrl.tables.user_code import REWARD
from oxrl.types import Named, Values

# Of these modules the functions and classes are compared, where they are loaded; so are those
# of the packages beside the core that have rewards.
WATCHED = (
    "builtins",
    "sys",
    "os",
    "os.path",
    "posix",
    "math",
    "cmath",
    "json",
    "json.decoder",
    "json.encoder",
    "json.scanner",
    "re",
    "random",
    "time",
    "datetime",
    "string",
    "statistics",
    "fractions",
    "decimal",
    "numbers",
    "collections",
    "itertools",
    "functools",
    "operator",
    "ast",
    "copy",
    "difflib",
    "hashlib",
    "io",
    "unicodedata",
    "subprocess",
    "signal",
    "pathlib",
    "oxrl.types",
    "oxrl.rewards.builtin",
    "oxrl.rewards.call_forms",
    "oxrl.rewards.loaded",
    "oxrl.usercode.signature",
)
# Of these classes the methods too: the others are written in C and cannot be changed.
CLASSES = (
    ("fractions", "Fraction"),
    ("json", "JSONEncoder"),
    ("json", "JSONDecoder"),
    ("random", "Random"),
    ("pathlib", "PurePath"),
    ("pathlib", "Path"),
    ("oxrl.types", "Prompt"),
    ("oxrl.types", "Completion"),
    ("oxrl.types", "Score"),
)


class Watch:
    """The things that scores are computed with in this process, as they are when this is made.

    Args:
        reward: the module of the user's file; None: the reward is built in.
    """

    def __init__(self, reward: ModuleType | None) -> None:
        beside = {place.partition(".")[0] for place in own_offers(REWARD.group).values()}
        beside.discard(OURS)  # of the core only what scores, in WATCHED
        ours = [name for name in sys.modules if name.partition(".")[0] in beside]
        self._loaded = {
            name: sys.modules[name] for name in (*WATCHED, *ours) if name in sys.modules
        }
        # Name of a module or class -> its names and what they stand for, now and at every check.
        held: dict[str, Named] = {name: vars(module) for name, module in self._loaded.items()}
        if reward is not None:
            held["the reward's own file"] = vars(reward)
        for module, name in CLASSES:
            if module in self._loaded:
                held[f"{module}.{name}"] = vars(getattr(self._loaded[module], name))
        self._held = held
        self._before: dict[str, Named] = {}
        for owner, names in held.items():
            functions = {name: value for name, value in list(names.items()) if callable(value)}
            self._before[owner] = functions
        self._settings = self._settings_now()

    def changed(self) -> str:
        """Name the first thing that is not as it was; empty if everything is."""
        for name, module in self._loaded.items():
            if sys.modules.get(name) is not module:
                return f"sys.modules[{name!r}]"
        for owner, before in self._before.items():
            held = self._held[owner]
            # All at once, by identity first: this runs after every sample.
            if before.items() <= held.items():
                continue
            for name, value in before.items():
                if held.get(name) is not value:
                    return f"{owner}.{name}"
        for name, value in self._settings_now().items():
            if value != self._settings[name]:
                return name
        return ""

    def _settings_now(self) -> Values:
        context = decimal.getcontext()
        try:
            folder = os.getcwd()
        except OSError:  # it was removed
            folder = ""
        return {
            "the working directory": folder,
            "decimal.getcontext()": (context.prec, context.rounding),
        }
