"""What a user writes and a configuration names: found, and called so that its errors are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from oxrl.errors import ConfigError, OxrlError
from oxrl.runs.os_errors import fault_of
from oxrl.usercode.given import given, is_given
from oxrl.usercode.packing import packed, unpacked
from oxrl.usercode.user_code import raised_as, run_module, split_place


class OwnCode(NamedTuple):
    """Something of the user's: what it is, its file if that is known, and where it is named.

    where: "train.loss=my_gate.py:my_gate", with which every message begins.
    """

    value: Any
    path: Path | None
    where: str

    def problem(self, text: str) -> ConfigError:
        """What is wrong with it, as an error."""
        return ConfigError(f"{self.where}: {text}")

    def call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What a function of it returns; what it raises told in words.

        Raises:
            ConfigError: it raised something, unless the machine refused.
        """
        try:
            return function(*args, **named)
        except Exception as error:
            if isinstance(error, OxrlError) or fault_of(error) is not None:
                raise
            name = getattr(function, "__name__", "it")
            raise self.problem(f"{name} raised {raised_as(error, self.path)}") from error

    def message(self) -> Any:
        """What `made_again` makes the same of in another process: training ranks are some.

        Raises:
            ConfigError: it cannot be sent there.
        """
        data = packed(self.value)
        if data is None:
            raise self.problem(
                "it holds something that cannot be sent to another process, and training ranks "
                "are other processes: set train.backend to local, or leave that out"
            )
        return (data, self.path, self.where)


def made_again(message: Any) -> OwnCode:
    """In another process: what `OwnCode.message` was made of."""
    data, path, where = message
    return OwnCode(unpacked(data), path, where)


def load_own(field: str, name: str, kind: Literal["gate", "feature"]) -> OwnCode:
    """What a name of the configuration stands for.

    Args:
        field: of the configuration.
        name: `path.py:name`, whose file is run, or the name of what Python gives.
        kind: what it is, and the argument of `oxrl.train` that gives it.

    Raises:
        ConfigError: the file cannot be run, or has no such name.
    """
    where = f"{field}={name}"
    try:
        if is_given(name):
            return OwnCode(given(name, kind), None, where)
        path, found = split_place(name, f"path.py:{kind}", ())
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    try:
        module = run_module(path, kind)
    # The file is the user's own code, which may raise anything.
    except (Exception, SystemExit) as error:
        raised = raised_as(error, path)
        raise ConfigError(f"{where}: running {path} raised {raised}") from error
    if not hasattr(module, found):
        raise ConfigError(f"{where}: {path} defines no {found}")
    return OwnCode(getattr(module, found), path, where)
