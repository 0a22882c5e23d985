"""The arguments of a user's policy loss, as far as they can be told without running it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping

from oxrl.errors import did_you_mean
from oxrl.tables.user_code import GATE
from oxrl.usercode.given import given, is_given
from oxrl.usercode.locate import place_of
from oxrl.usercode.signature import Signature, signature_in, signature_of

# What every gate is called with, in this order, and by its name.
POSITIONAL = ("logprobs", "old_logprobs", "advantages", "mask", "loss_weights")
CORRECTION = "correction"
WANTED = (
    f"a policy loss is a function gate({', '.join(POSITIONAL)}, *, correction=None, <numbers>) "
    "that returns (loss, metrics); docs/extend.md has one"
)


def gate_signature(loss: str) -> Signature | None:
    """Read the arguments of a named function, nothing run; None where only running it can tell.

    Args:
        loss: `train.loss`.

    Raises:
        ValueError: there is no such function; says what to write.
    """
    place = place_of(GATE, loss)
    if is_given(loss):
        value = given(loss, GATE.noun)
        if inspect.isclass(value):
            raise ValueError(f"{value.__name__} is a class, not a function: {WANTED}")
        if not callable(value):
            raise ValueError(f"{type(value).__name__} is not a function: {WANTED}")
        try:
            return signature_of(value)
        except (TypeError, ValueError):  # compiled, or without a signature that makes sense
            return None
    if place.file is None:
        return None
    tree = ast.parse(place.file.read_bytes(), filename=str(place.file))
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return signature_in(found[place.name]) if place.name in found else None


def why_no_gate(taken: Signature) -> str:
    """Say why a function cannot be called as every gate is; empty if it can."""
    count = len(taken.by_place)
    problem = ""
    if count < len(POSITIONAL) and not taken.any_place:
        listed = ", ".join(taken.by_place) or "none"
        problem = f"takes {count} arguments ({listed}) of the 5 it is given"
    elif CORRECTION not in further(taken) and not taken.any_name:
        problem = "takes no correction, which every gate is given by its name, a tensor or None"
    return f"{problem}: {WANTED}" if problem else ""


def further(taken: Signature) -> list[str]:
    """List what a gate takes beside the tensors that every gate is given by their places."""
    return [*taken.by_place[len(POSITIONAL) :], *taken.by_name]


def number_problems(loss: str, taken: Signature, numbers: Mapping[str, object]) -> list[str]:
    """Numbers that the function does not take, and numbers that it cannot do without.

    Args:
        loss: `train.loss`.
        taken: by its function.
        numbers: of `train.loss_numbers`.
    """
    known = [name for name in further(taken) if name != CORRECTION]
    problems: list[str] = []
    for name in numbers:
        if name not in known and not taken.any_name:
            listed = ", ".join(known) or "none"
            hint = did_you_mean(name, known)
            problems.append(f"{name} is no number of {loss}, which takes {listed}{hint}")
    missing = [name for name in known if name in taken.needed and name not in numbers]
    if missing:
        rule = f"{loss} has no default for {', '.join(missing)}: write {{{missing[0]}: VALUE}}"
        problems.append(rule)
    return problems
