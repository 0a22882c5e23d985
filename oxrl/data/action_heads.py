"""The actions that a model was trained with, of whatever kind, from its folder."""

from __future__ import annotations

from pathlib import Path

from oxrl.data.actions import HEAD_FILE, ActionHead, object_in
from oxrl.data.fast_head import fast_head
from oxrl.errors import DataError


def read_head(directory: Path) -> ActionHead | None:
    """Read the actions that a model was trained with; None where its folder names none.

    Args:
        directory: of the model, with `action_head.json` in it where it was trained with actions.

    Raises:
        DataError: the file is damaged.
    """
    path = directory / HEAD_FILE
    if not path.is_file():
        return None
    fields = object_in(path)
    if "code" in fields:
        return fast_head(fields, path)
    try:
        given = {name: tuple(value) for name, value in fields.items() if name != "chunk"}
        return ActionHead(chunk=int(fields["chunk"]), **given)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} describes no actions: {error}") from error
