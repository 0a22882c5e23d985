"""The helpers that the adapters of other libraries' environments share."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from oxrl.errors import MissingExtraError
from oxrl.types import Prompt
from oxrl.usercode.environments import Message

# Longest observation that the policy reads, in characters.
MOST_OBSERVATION = 8000


def need(module: str, extra: str) -> Any:
    """A library that is no part of oxRL's own installation.

    Args:
        module: its name for Python; what it stands in is imported too.
        extra: of oxRL's, that installs it.

    Returns:
        The module.

    Raises:
        MissingExtraError: it is not installed; says what installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent = (error.name or "").partition(".")[0] == module.partition(".")[0]
        problem = "is not installed" if absent else f"cannot be imported: {error}"
        raise MissingExtraError(f'{module} {problem}: pip install -e ".[{extra}]"') from error


def with_text(messages: Sequence[Message], text: str, *, between: str = "") -> list[Message]:
    """A conversation, with a text behind its last message.

    Args:
        messages: at least one; not changed.
        text: to be said there.
        between: stands before it, where the last message has a text, a line end for example.

    Returns:
        A list with the same messages and another last one; of parts, where that has parts.
    """
    last = messages[-1]
    content = last["content"]
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": f"{content}{between}{text}"}]
    behind = {"type": "text", "text": f"{between}{text}"}
    return [*messages[:-1], {**last, "content": [*content, behind]}]


def shown_with(image: object, content: str | Sequence[object]) -> list[object]:
    """An image and what is said with it, as parts of a message.

    Args:
        image: in any form that rows of data may have, or an array; see `observed`.
        content: a text, or parts of one.

    Returns:
        The image first.
    """
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{"type": "image", "image": image}, *texts]


def seed_of(prompt: Prompt, seed: int) -> int:
    """The seed of an episode: a row's own column `seed`, or the one of the draw.

    Args:
        prompt: the row of data.
        seed: of the draw, used where the row names none.

    Returns:
        A number below 2**32, which every library takes.
    """
    own = prompt.metadata.get("seed")
    return (own if isinstance(own, int) else seed) % 2**32
