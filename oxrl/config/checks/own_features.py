"""Features of the user's own, `train.features`, as far as can be judged without running them."""

from __future__ import annotations

from oxrl.config.checks.base import Problems
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.usercode.given import given, is_given
from oxrl.usercode.user_code import split_place

FORMS = "path.py:Class such as my_feature.py:MyFeature"


def check_own_features(cfg: Config) -> Problems:
    """Every file is there and may define its class; what a program gave is still given.

    Args:
        cfg: of a run of reinforcement learning.
    """
    named: dict[str, str] = {}
    for name in cfg.train.features:
        try:
            if is_given(name):
                given(name, "feature")
                found = name
            else:
                _, found = split_place(name, FORMS, ())
        except ValueError as error:
            yield Problem("train.features", str(error), name)
            continue
        short = found.rpartition(":")[2]
        if short in named:
            rule = f"two features are called {short}, here and in {named[short]}: rename one"
            yield Problem("train.features", rule, name)
        named[short] = name
