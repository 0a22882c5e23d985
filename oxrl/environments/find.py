"""An environment found by its name in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from oxrl.entry_points import is_ours
from oxrl.tables.user_code import ENVIRONMENT
from oxrl.usercode.environments import tool_names
from oxrl.usercode.find import find
from oxrl.usercode.given import is_given


def find_environment(name: str) -> Callable[..., Any]:
    """Find an environment's class and run the file that defines it, but not the class itself.

    Args:
        name: of an environment of oxRL's, "path.py:Class", or of what Python or an installed
            package gives.

    Returns:
        What is called with the options of the config to make an instance.

    Raises:
        EnvironmentDefinitionError: nothing loadable under that name, or it has no `reset` and
            `step`; says what to change.
    """
    code = find(ENVIRONMENT, name)
    if is_ours(ENVIRONMENT, name):
        return code.value
    made = code.value
    # A function that makes one is as good as a class; what it makes is looked at then.
    if is_given(name) and not isinstance(made, type) and callable(made):
        return made
    # Answers turns by itself, of text or of actions.
    steps = any(callable(getattr(made, answer, None)) for answer in ("step", "act"))
    found = name if is_given(name) else name.rpartition(":")[2]
    problem = ""
    if not isinstance(made, type):
        problem = f"{found} is no class, but {type(made).__name__}"
    elif not callable(getattr(made, "reset", None)):
        problem = f"{found} has no method reset"
    elif not steps and not tool_names(made):
        problem = f"{found} has no method step, and no typed method that could be a tool"
    if problem:
        raise code.problem(
            f"{problem}; an environment is a class with reset(prompt, seed) and step(text)"
        )
    if steps:
        return made
    from oxrl.environments.object_tools import ObjectTools  # most classes have a step

    return partial(ObjectTools, made)
