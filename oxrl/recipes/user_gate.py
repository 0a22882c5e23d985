"""The policy loss that `train.loss` names: of the table, or of a user's own file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import cast

from oxrl.config.schema import is_own
from oxrl.errors import ConfigError
from oxrl.functional.gates import Gate
from oxrl.functional.policy_losses import GATES


def find_gate(loss: str) -> Gate:
    """Return the function of a policy loss.

    Args:
        loss: name in `GATES`, or `path.py:function`; the file is run.

    Raises:
        ConfigError: the file cannot be imported, or defines no such function.
    """
    if not is_own(loss):
        return GATES[loss]
    file, _, name = loss.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"train.loss={loss}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    # The file is the user's own code, which may raise anything.
    except Exception as error:
        raise ConfigError(f"train.loss={loss}: importing {file} failed: {error!r}") from error
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"train.loss={loss}: {file} defines no function {name}")
    return cast(Gate, getattr(module, name))
