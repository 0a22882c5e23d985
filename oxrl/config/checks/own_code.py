"""A policy loss and features of the user's own, `train.loss` and `train.features`, as far as they
can be judged without running them.
"""

from __future__ import annotations

from oxrl.config.checks.base import Problems
from oxrl.config.schema import Config
from oxrl.config.sections.train import is_own
from oxrl.config.source import Problem
from oxrl.tables.user_code import FEATURE
from oxrl.usercode.gate_signature import gate_signature, number_problems, why_no_gate
from oxrl.usercode.locate import place_of


def check_own_gate(cfg: Config) -> Problems:
    """The function is there and takes what a gate is given, and the numbers of its run.

    Args:
        cfg: of a run of reinforcement learning.
    """
    loss = cfg.train.row.gate
    if not is_own(loss):
        return
    try:
        taken = gate_signature(loss)
    except ValueError as error:
        yield Problem("train.loss", str(error), loss)
        return
    if taken is None:
        return
    problem = why_no_gate(taken)
    if problem:
        yield Problem("train.loss", problem, loss)
        return
    numbers = cfg.train.loss_numbers
    for rule in number_problems(loss, taken, numbers):
        yield Problem("train.loss_numbers", rule, numbers, also=("train.loss",))


def check_own_features(cfg: Config) -> Problems:
    """Every file is there and may define its class; what a program gave is still given.

    Args:
        cfg: of a run of reinforcement learning.
    """
    named: dict[str, str] = {}
    for name in cfg.train.features:
        try:
            place_of(FEATURE, name)
        except ValueError as error:
            yield Problem("train.features", str(error), name)
            continue
        short = name.rpartition(":")[2]
        if short in named:
            rule = f"two features are called {short}, here and in {named[short]}: rename one"
            yield Problem("train.features", rule, name)
        named[short] = name
