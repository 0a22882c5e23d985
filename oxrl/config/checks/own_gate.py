"""A policy loss of the user's own, `train.loss: path.py:function` or `oxrl.train(gate=function)`,
as far as it can be judged without running it.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from inspect import Parameter

from oxrl.config.checks.base import Problems
from oxrl.config.schema import Config
from oxrl.config.sections.train import is_own
from oxrl.config.source import Problem
from oxrl.errors import did_you_mean
from oxrl.usercode.given import given, is_given
from oxrl.usercode.user_code import split_place

# What every gate is called with, in this order, and by its name.
POSITIONAL = ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights")
CORRECTION = "correction"
WANTED = (
    f"a policy loss is a function gate({', '.join(POSITIONAL)}, *, correction=None, <numbers>) "
    "that returns (loss, metrics); docs/extend.md has one"
)
FORMS = "a name of `oxrl algorithms`, or path.py:function such as my_gate.py:my_gate"
POSITIONAL_KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass
class Taken:
    """What a function takes.

    places: names of what can be given by its place. needed: those without a default, by any way.
    named: names of what can only be given by its name. any_places, any_names: it has *, or **.
    """

    places: list[str] = field(default_factory=list[str])
    named: list[str] = field(default_factory=list[str])
    needed: set[str] = field(default_factory=set[str])
    any_places: bool = False
    any_names: bool = False

    @property
    def numbers(self) -> list[str]:
        """What `train.loss_numbers` may hold."""
        further = [*self.places[len(POSITIONAL) :], *self.named]
        return [name for name in further if name != CORRECTION]


def check_own_gate(cfg: Config) -> Problems:
    """The function is there and takes what a gate is given, and the numbers of its run.

    Args:
        cfg: of a run of reinforcement learning.
    """
    loss = cfg.train.row.gate
    if not is_own(loss):
        return
    try:
        taken = taken_by(loss)
    except ValueError as error:
        yield Problem("train.loss", str(error), loss)
        return
    if taken is None:
        return
    problem = _why_no_gate(taken)
    if problem:
        yield Problem("train.loss", f"{problem}: {WANTED}", loss)
        return
    yield from _number_problems(cfg, taken)


def taken_by(loss: str) -> Taken | None:
    """What the function of a name takes, nothing run; None where only running it can tell.

    Raises:
        ValueError: there is no such function; says what to write.
    """
    if is_given(loss):
        return _taken_by_object(given(loss, "gate"))
    path, name = split_place(loss, FORMS, ())
    tree = ast.parse(path.read_bytes(), filename=str(path))
    found = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    return _taken_by_text(found[name]) if name in found else None


def _taken_by_object(value: object) -> Taken | None:
    if inspect.isclass(value):
        raise ValueError(f"{value.__name__} is a class, not a function: {WANTED}")
    if not callable(value):
        raise ValueError(f"{type(value).__name__} is not a function: {WANTED}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # compiled, or without a signature that makes sense
        return None
    taken = Taken()
    for parameter in signature.parameters.values():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            taken.any_places = True
        elif parameter.kind is Parameter.VAR_KEYWORD:
            taken.any_names = True
        else:
            by_place = parameter.kind in POSITIONAL_KINDS
            (taken.places if by_place else taken.named).append(parameter.name)
            if parameter.default is Parameter.empty:
                taken.needed.add(parameter.name)
    return taken


def _taken_by_text(arguments: ast.arguments) -> Taken:
    places = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    named = [argument.arg for argument in arguments.kwonlyargs]
    needed = set(places[: len(places) - len(arguments.defaults)])
    for name, default in zip(named, arguments.kw_defaults, strict=True):
        if default is None:
            needed.add(name)
    any_places = arguments.vararg is not None
    any_names = arguments.kwarg is not None
    return Taken(places, named, needed, any_places, any_names)


def _why_no_gate(taken: Taken) -> str:
    """Why a function cannot be called as every gate is; empty if it can."""
    count = len(taken.places)
    if count < len(POSITIONAL) and not taken.any_places:
        return f"takes {count} arguments ({', '.join(taken.places) or 'none'}) of the 5 it is given"
    by_name = (*taken.places[len(POSITIONAL) :], *taken.named)
    if CORRECTION not in by_name and not taken.any_names:
        return "takes no correction, which every gate is given by its name, a tensor or None"
    return ""


def _number_problems(cfg: Config, taken: Taken) -> Problems:
    """Numbers that the function does not take, and numbers that it cannot do without."""
    loss = cfg.train.row.gate
    numbers = cfg.train.loss_numbers
    known = taken.numbers
    for name in numbers:
        if name not in known and not taken.any_names:
            listed = ", ".join(known) or "none"
            rule = f"{name} is no number of {loss}, which takes {listed}{did_you_mean(name, known)}"
            yield Problem("train.loss_numbers", rule, numbers, also=("train.loss",))
    missing = [name for name in known if name in taken.needed and name not in numbers]
    if missing:
        rule = f"{loss} has no default for {', '.join(missing)}: write {{{missing[0]}: VALUE}}"
        yield Problem("train.loss_numbers", rule, numbers, also=("train.loss",))
