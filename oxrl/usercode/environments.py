"""How an environment is found by name, and what it says made sure of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, SupportsFloat, cast

from oxrl.environments.base import Message, Step, tool_names
from oxrl.environments.observed import as_parts
from oxrl.errors import EnvironmentDefinitionError
from oxrl.types import Named
from oxrl.usercode.given import given, is_given, name_of
from oxrl.usercode.user_code import raised_as, run_module, split_place

# name -> (module, class), imported where it is asked for.
BUILTINS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "agent": ("oxrl_envs.agent", "AgentEnvironment"),
        "gymnasium": ("oxrl_envs.gymnasium_adapter", "GymnasiumEnvironment"),
        "openenv": ("oxrl_envs.openenv_adapter", "OpenEnvEnvironment"),
        "raster-world": ("oxrl_robots.raster_world", "RasterEnvironment"),
        "reasoning-gym": ("oxrl_envs.reasoning_gym_adapter", "ReasoningGymEnvironment"),
        "simulator": ("oxrl_robots.simulator", "SimulatorEnvironment"),
        "textarena": ("oxrl_envs.textarena_adapter", "TextArenaEnvironment"),
        "tools": ("oxrl.environments.tool_environment", "ToolEnvironment"),
    }
)
# Of `oxrl.train`: what a class is given by.
ARGUMENT = "environment"
ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = tuple(field.name for field in dataclasses.fields(Step))
# What a step that is no Step has to have.
REQUIRED = tuple(name for name in FIELDS if name not in ("after", "executed", "success"))


def locate(name: str) -> tuple[Path | None, str]:
    """Say where an environment is, without running anything.

    Args:
        name: a key of BUILTINS, "path.py:Class", or the name of a class that Python gives.

    Returns:
        The file, None of a built-in and of what Python gives; and the class's name.

    Raises:
        EnvironmentDefinitionError: neither, or the file is not there, no Python, or surely without
            such a class.
    """
    if name in BUILTINS:
        return None, ""
    if is_given(name):
        try:
            given(name, ARGUMENT)
        except ValueError as error:
            raise EnvironmentDefinitionError(f"environment.name={name}: {error}") from error
        return None, ""
    forms = f"{', '.join(BUILTINS)} or path.py:Class (such as my_game.py:Guess)"
    try:
        return split_place(name, forms, BUILTINS)
    except ValueError as error:
        raise EnvironmentDefinitionError(f"environment.name={name}: {error}") from error


def find_environment(name: str) -> Callable[..., Any]:
    """Find an environment's class and run the file that defines it, but not the class itself.

    Args:
        name: a key of BUILTINS, "path.py:Class", or the name of a class that Python gives.

    Returns:
        What is called with the options of the config to make an instance.

    Raises:
        EnvironmentDefinitionError: nothing loadable under that name, or it has no `reset` and
            `step`; says what to change.
    """
    path, found = locate(name)
    if is_given(name):
        made = given(name, ARGUMENT)
        # A function that makes one is as good as a class; what it makes is looked at then.
        makes = not isinstance(made, type) and callable(made)
        return made if makes else _as_class(name, made, name_of(made))
    if path is None:
        import importlib

        module_name, found = BUILTINS[name]
        return cast(Callable[..., Any], getattr(importlib.import_module(module_name), found))
    try:
        module = run_module(path, "environment")
    except (Exception, SystemExit) as error:
        raised = f"running {path} raised {raised_as(error, path)}"
        raise EnvironmentDefinitionError(f"environment.name={name}: {raised}") from error
    return _as_class(name, getattr(module, found, None), found)


def _as_class(name: str, made: object, found: str) -> Callable[..., Any]:
    """What makes environments of a class.

    Args:
        name: of the environment in the configuration.
        made: what was found.
        found: its own name.

    Raises:
        EnvironmentDefinitionError: it is no class, or has not the methods of one.
    """
    problem = ""
    if not isinstance(made, type):
        problem = f"{found} is no class, but {type(made).__name__}"
    elif not callable(getattr(made, "reset", None)):
        problem = f"{found} has no method reset"
    elif not _steps(made) and not tool_names(made):
        problem = f"{found} has no method step, and no typed method that could be a tool"
    if problem:
        raise EnvironmentDefinitionError(
            f"environment.name={name}: {problem}; an environment is a class with "
            "reset(prompt, seed) and step(text)"
        )
    if _steps(made):
        return cast(Callable[..., Any], made)
    from oxrl.environments.object_tools import ObjectTools

    return partial(ObjectTools, cast(type, made))


def _steps(made: object) -> bool:
    """Whether a class answers turns by itself, of text or of actions."""
    return callable(getattr(made, "step", None)) or callable(getattr(made, "act", None))


def as_messages(value: object, what: str) -> list[Message]:
    """What `reset` or a step answered, as a list of messages.

    Args:
        value: a text, which the user says; a message; a list of messages; or None: nothing.
        what: gave it, "reset" or "step".

    Returns:
        Messages with a known role; contents are texts or lists of parts.

    Raises:
        ValueError: it is none; says what `what` has to give.
    """
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise ValueError(f"{what} gave {type(value).__name__}, need a text or a list of messages")
    messages: list[Message] = []
    for item in cast(Sequence[object], value):
        messages.append(_as_message(item, what))
    return messages


def _as_message(item: object, what: str) -> Message:
    if not isinstance(item, Mapping):
        raise ValueError(f"{what} gave a message of type {type(item).__name__}, need a mapping")
    fields = dict(cast(Named, item))
    if fields.get("role") not in ROLES:
        known = ", ".join(ROLES)
        raise ValueError(f"{what} gave a message of role {fields.get('role')!r}, need {known}")
    content = fields.get("content")
    said = content
    if isinstance(content, list | tuple):
        parts = as_parts(cast(Sequence[object], content), what)
        fields["content"] = parts
        said = "".join(part.get("text", "") for part in parts)
    if not isinstance(said, str):
        raise ValueError(f"{what} gave a message whose content is {type(content).__name__}")
    try:
        said.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} gave text that cannot be written as UTF-8: {error}") from error
    return fields


def as_step(value: object) -> Step:
    """What `step` answered, its messages a list and its numbers plain.

    Args:
        value: a Step, a mapping with its fields, or any object that has them.

    Returns:
        A Step of its own.

    Raises:
        ValueError: it is no Step.
    """
    if isinstance(value, Mapping):
        fields = dict(cast(Named, value))
        unknown = [name for name in fields if name not in FIELDS]
        if unknown:
            raise ValueError(f"step gave {unknown[0]!r}, a Step has {', '.join(FIELDS)}")
        value = Step(**fields)
    if not all(hasattr(value, name) for name in REQUIRED):
        kind = type(value).__name__
        raise ValueError(f"step gave {kind}, need a Step: {', '.join(FIELDS)}")
    step = cast(Step, value)
    messages = as_messages(step.messages, "step")
    after: object = getattr(step, "after", None)
    if after is not None and (not isinstance(after, int) or after < -1):
        raise ValueError(f"step gave after={after!r}, need the number of a turn, or -1")
    if after != -1 and any(message["role"] == "assistant" for message in messages):
        raise ValueError("step gave a message of the assistant, which only the policy writes")
    given: object = step.reward
    if not isinstance(given, SupportsFloat):
        raise ValueError(f"step gave the reward {given!r}, need a number")
    reward = float(given)
    if not math.isfinite(reward):
        raise ValueError(f"step gave the reward {reward}, need a finite number")
    return Step(
        messages,
        reward,
        bool(step.terminated),
        bool(step.truncated),
        str(step.reason),
        after,
        _executed(step),
        _success(step),
    )


def _executed(step: Step) -> int | None:
    """How many actions of a turn were done; None: all."""
    executed: object = getattr(step, "executed", None)
    if executed is None:
        return None
    if not isinstance(executed, int) or executed < 1:
        raise ValueError(f"step gave executed={executed!r}, need how many actions were done")
    return executed


def _success(step: Step) -> bool | None:
    """Whether the task is done; None: the environment does not say."""
    success: object = getattr(step, "success", None)
    return None if success is None else bool(success)
