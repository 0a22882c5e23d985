"""The user's code that a configuration names: found, and called so that its errors are told."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from oxrl.entry_points import own_thing
from oxrl.errors import OxrlError
from oxrl.runs.os_errors import fault_of
from oxrl.tables.user_code import Kind
from oxrl.usercode.given import given, is_given, packed, unpacked
from oxrl.usercode.locate import locate
from oxrl.usercode.messages import Json
from oxrl.usercode.user_code import raised_as, run_module


class UserCode(NamedTuple):
    """Something of a user's, and how it is called in the configuration.

    value: a function, a class, or what was made of it. file: of the user's, None where there is
    none. module: that was run.
    """

    kind: Kind
    name: str
    value: Any
    file: Path | None = None
    module: ModuleType | None = None

    def problem(self, text: str) -> OxrlError:
        """Return an error that says what is wrong with it."""
        return self.kind.problem(self.name, text)

    def call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a function of it; what it raises is told in words.

        Raises:
            OxrlError: it raised something, unless the machine refused.
        """
        try:
            return function(*args, **named)
        except Exception as error:
            if isinstance(error, OxrlError) or fault_of(error) is not None:
                raise
            name = getattr(function, "__name__", "it")
            raise self.problem(f"{name} raised {raised_as(error, self.file)}") from error

    def __reduce__(self) -> tuple[Callable[..., UserCode], tuple[Any, ...]]:
        """Return what `pickle` makes the same of in another process; the module stays here.

        Raises:
            OxrlError: it cannot be sent there.
        """
        data = packed(self.value)
        if data is None:
            raise self.problem(
                "it holds something that cannot be sent to another process, and training ranks "
                "are other processes: set train.backend to local, or leave that out"
            )
        return _made_again, (self.kind, self.name, data, self.file)


def _made_again(kind: Kind, name: str, data: Json, file: Path | None) -> UserCode:
    return UserCode(kind, name, unpacked(data), file)


def find(kind: Kind, name: str) -> UserCode:
    """Find something by its name; the file or module that defines it is run.

    Args:
        kind: of code.
        name: as of `locate`.

    Raises:
        OxrlError: `kind.error`: as of `locate`; or running it raised something.
    """
    place = locate(kind, name)
    if is_given(name):
        return UserCode(kind, name, given(name, kind.noun))
    if place.ours:
        return UserCode(kind, name, own_thing(kind, name))
    doing = f"importing {place.module}"
    try:
        if place.module or place.file is None:
            module = import_module(place.module)
        else:
            doing = f"running {place.file}"
            module = run_module(place.file, kind.noun)
    # It is the user's own code, which may raise anything.
    except (Exception, SystemExit) as error:
        raised = f"{doing} raised {raised_as(error, place.file)}"
        raise kind.problem(name, raised) from error
    if not hasattr(module, place.name):
        raise kind.problem(name, f"{place.file or place.module} defines no {place.name}")
    return UserCode(kind, name, getattr(module, place.name), place.file, module)
