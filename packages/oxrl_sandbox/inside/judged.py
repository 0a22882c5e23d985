"""The process that runs judged code, after it has been confined. Nothing in it is believed.

It answers calls that come from the grader: what to call, with plain data, and plain data back.
"""

from __future__ import annotations

import ast
import operator
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import islice
from types import ModuleType

from oxrl_sandbox.inside import plain
from oxrl_sandbox.inside.plain import Json, Wire

# Longest text of an exception that is told.
MOST_TEXT = 300
# Most items that are read from an iterator at once.
MOST_ITEMS = 1 << 20


class Objects:
    """The objects that judged code returned and that are no plain data, by number."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def keep(self, value: object) -> list[Wire]:
        """Keep a value here, and make a reference to it.

        Args:
            value: anything; it lives as long as this.

        Returns:
            "object", its number and the name of its class.
        """
        self._kept.append(value)
        return ["object", len(self._kept) - 1, type(value).__name__]

    def find(self, reference: list[Wire]) -> object:
        """Return the object that a reference stands for.

        Args:
            reference: what `keep` made, without the word "object".

        Raises:
            IndexError: there is no such object.
        """
        return self._kept[reference[0]]

    def encode(self, value: object) -> Wire:
        """A value, as the grader gets it.

        Args:
            value: plain data, or anything else, which is kept here and sent as a reference.
        """
        return plain.encode(value, self.keep)

    def decode(self, data: Wire) -> Wire:
        """A value that the grader sent.

        Args:
            data: as `plain.encode` made it there.
        """
        return plain.decode(data, self.find)


def items_of(value: Wire) -> list[object]:
    """List what iterating over an object gives, up to MOST_ITEMS.

    Args:
        value: anything; what iterating raises passes through.

    Raises:
        ValueError: there are more than MOST_ITEMS.
    """
    items = list(islice(value, MOST_ITEMS + 1))
    if len(items) > MOST_ITEMS:
        raise ValueError(f"iterates over more than {MOST_ITEMS} items")
    return items


# What the grader may do with an object, by name.
ACTIONS: dict[str, Callable[..., object]] = {
    "items": items_of,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "int": int,
    "float": float,
    "item": operator.getitem,
    "attribute": getattr,
    "set": setattr,
}


def serve(fd: int, program: Json) -> None:
    """Run a program, then answer calls until the grader hangs up.

    Args:
        fd: the socket to the grader.
        program: `code`; `prompt` and `entry` where the code completes a given text.
    """
    objects = Objects()
    try:
        namespace = load(program)
    except BaseException as error:  # noqa: BLE001 - whatever judged code raises is the result
        plain.send(fd, {"failed": told(error)})
        return
    plain.send(fd, {})
    while True:
        try:
            request = plain.receive(fd)
        except plain.Closed:
            return
        try:
            reply = answer(namespace, objects, request)
        except BaseException as error:  # noqa: BLE001 - as above; exiting is no way out either
            reply = {"raised": told(error)}
        try:
            plain.send(fd, reply)
        except (plain.TooLong, TypeError, ValueError, RecursionError) as error:
            plain.send(fd, {"raised": told(error)})


def load(program: Json) -> dict[str, Wire]:
    """Run a program, and return the names that it defines.

    A program that completes a given text may be whole or only go on where the text ends.

    Args:
        program: `code`; and where it completes something, `prompt` and `entry`, the function's
            name.

    Returns:
        Its namespace.

    Raises:
        Exception: what the program raises.
    """
    # Dataclasses look themselves up there.
    module = sys.modules["solution"] = ModuleType("solution")
    namespace = vars(module)
    prompt = program.get("prompt", "")
    entry = program.get("entry", "")
    whole = parsed(program["code"])
    code = program["code"]
    continued = None
    if prompt and (whole is None or not defines(whole, entry)):
        continued = parsed(prompt + code)
    if continued is not None:
        code = continued
    elif given := parsed(prompt):
        given.body = [node for node in given.body if getattr(node, "name", None) != entry]
        exec(compile(given, "<prompt>", "exec"), namespace)
    exec(compile(code, "<program>", "exec"), namespace)
    return namespace


def parsed(source: str) -> ast.Module | None:
    """The syntax tree of a source; None where it is no Python.

    Args:
        source: any text.
    """
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def defines(tree: ast.Module, name: str) -> bool:
    """True if a source binds `name` anywhere: by a definition, an assignment or an import.

    Args:
        tree: of the source.
        name: looked for also inside of functions; `import *` counts as it.
    """
    bound: set[object] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        bound |= {getattr(node, "name", None), getattr(node, "asname", None)}
    return not bound.isdisjoint((name, "*"))


def answer(namespace: dict[str, Wire], objects: Objects, request: Json) -> Json:
    """Do what the grader asks for.

    Args:
        namespace: of the program.
        objects: what the grader has references to.
        request: `do`, and what that needs.

    Returns:
        The reply: `names`, or `value`; of a call also `changed`, place and new contents of those
        arguments by position that it changed.

    Raises:
        Exception: what the program raises.
    """
    if request["do"] == "names":
        found = {name: namespace[name] for name in request["names"] if name in namespace}
        return {"names": {name: objects.encode(value) for name, value in found.items()}}
    target: Wire = objects.find(request["of"])
    arguments = [objects.decode(data) for data in request["arguments"]]
    if request["do"] != "call":
        return {"value": objects.encode(ACTIONS[request["do"]](target, *arguments))}
    named = {name: objects.decode(data) for name, data in request["named"].items()}
    value = target(*arguments, **named)
    changed: list[Wire] = []
    for index, given in enumerate(request["arguments"]):
        if isinstance(given, list) and given[0] != "object":
            now = objects.encode(arguments[index])
            if now != given:
                changed.append((index, now))
    return {"value": objects.encode(value), "changed": changed}


def told(error: BaseException) -> list[Wire]:
    """An exception as plain data: the names of its classes, and what it says.

    Args:
        error: what judged code raised.

    Returns:
        The names, nearest first, and at most MOST_TEXT characters of its text; an empty text where
        that cannot be had.
    """
    names = [kind.__name__ for kind in type(error).__mro__]
    try:
        text = str(error)[:MOST_TEXT]
    except BaseException:  # noqa: BLE001 - its `__str__` is judged code too
        text = ""
    return [names, text]


def _is_waited_for(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.current_thread()


def run_as_main(source: str) -> int:
    """Run a program as Python runs a script, which ends when all of its threads have, but for
    daemons.

    Args:
        source: of the program, whose `__name__` is "__main__".

    Returns:
        Its exit status.
    """
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(source, "<program>", "exec"), vars(module))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - what Python does with an exception nobody catches
        traceback.print_exc(limit=-3)
        status = 1
    while threads := [thread for thread in threading.enumerate() if _is_waited_for(thread)]:
        for thread in threads:
            thread.join()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        status = status or 1
    return status & 0xFF
