"""Answers of an environment, made sure of before anything is computed from them.

An environment may write an image as an array, a PIL image or a file, which no line of JSON holds.
What leaves its process is text, PNG in base64, and the same picture is always the same text.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, SupportsFloat

from oxrl.types import IMAGE_NAME, ROLES
from oxrl.usercode.environments import Message, Step

Part = Mapping[str, Any]
FORMS = "an array of uint8 [height, width, 3] or [height, width], a PIL image, a path, or bytes"
FIELDS = tuple(field.name for field in dataclasses.fields(Step))
# What a step that is no Step has to have.
REQUIRED = tuple(name for name in FIELDS if name not in ("after", "executed", "success"))


def as_messages(value: object, what: str) -> list[Message]:
    """Return what `reset` or a step answered as a list of messages.

    Args:
        value: a text, which the user says; a message; a list of messages; or None: nothing.
        what: gave it, "reset" or "step".

    Returns:
        Messages with a known role; contents are texts or lists of parts.

    Raises:
        ValueError: it is none; says what `what` has to give.
    """
    if value is None:
        return []
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise ValueError(f"{what} gave {type(value).__name__}, need a text or a list of messages")
    return [_as_message(item, what) for item in value]


def _as_message(item: object, what: str) -> Message:
    if not isinstance(item, Mapping):
        raise ValueError(f"{what} gave a message of type {type(item).__name__}, need a mapping")
    fields = dict(item)
    if fields.get("role") not in ROLES:
        known = ", ".join(ROLES)
        raise ValueError(f"{what} gave a message of role {fields.get('role')!r}, need {known}")
    content = fields.get("content")
    said = content
    if isinstance(content, list | tuple):
        parts = as_parts(content, what)
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
    """Return what `step` answered, its messages a list and its numbers plain.

    Args:
        value: a Step, a mapping with its fields, or any object that has them.

    Returns:
        A Step of its own.

    Raises:
        ValueError: it is no Step.
    """
    if isinstance(value, Mapping):
        fields = dict(value)
        unknown = [name for name in fields if name not in FIELDS]
        if unknown:
            raise ValueError(f"step gave {unknown[0]!r}, a Step has {', '.join(FIELDS)}")
        value = Step(**fields)
    if not all(hasattr(value, name) for name in REQUIRED):
        kind = type(value).__name__
        raise ValueError(f"step gave {kind}, need a Step: {', '.join(FIELDS)}")
    step: Any = value
    messages = as_messages(step.messages, "step")
    after = getattr(step, "after", None)
    if after is not None and (not isinstance(after, int) or after < -1):
        raise ValueError(f"step gave after={after!r}, need the number of a turn, or -1")
    if after != -1 and any(message["role"] == "assistant" for message in messages):
        raise ValueError("step gave a message of the assistant, which only the policy writes")
    given = step.reward
    if not isinstance(given, SupportsFloat):
        raise ValueError(f"step gave the reward {given!r}, need a number")
    reward = float(given)
    if not math.isfinite(reward):
        raise ValueError(f"step gave the reward {reward}, need a finite number")
    success = getattr(step, "success", None)
    return Step(
        messages,
        reward,
        bool(step.terminated),
        bool(step.truncated),
        str(step.reason),
        after,
        _executed(step),
        None if success is None else bool(success),
    )


def _executed(step: Any) -> int | None:
    """Return the number of actions of a turn that were done; None: all."""
    executed = getattr(step, "executed", None)
    if executed is not None and (not isinstance(executed, int) or executed < 1):
        raise ValueError(f"step gave executed={executed!r}, need how many actions were done")
    return executed


def as_parts(content: Sequence[object], what: str) -> list[Part]:
    """Parts of text and images, with images as text.

    Args:
        content: `{"type": "text", "text": ...}` and `{"type": "image", "image": FORMS}`.
        what: said it, for errors.

    Returns:
        Parts of text, `{"type": "image", "base64": ...}`, and images that have a name already.

    Raises:
        ValueError: a part is none of these; says what `what` has to give.
    """
    parts: list[Part] = []
    for item in content:
        if not isinstance(item, Mapping):
            raise ValueError(f"{what} gave a part of type {type(item).__name__}, need a mapping")
        kind = item.get("type")
        if kind == "image":
            parts.append(_as_image(item, what))
        elif kind == "text" and isinstance(item.get("text"), str):
            parts.append({"type": "text", "text": item["text"]})
        else:
            raise ValueError(
                f"{what} gave a part of type {kind!r}, need "
                '{"type": "text", "text": ...} or {"type": "image", "image": ...}'
            )
    return parts


def _as_image(part: Part, what: str) -> Part:
    if isinstance(part.get("base64"), str):
        return {"type": "image", "base64": part["base64"]}
    found = part.get("image", part.get("path", part.get("bytes")))
    if isinstance(found, str) and IMAGE_NAME.fullmatch(found):
        return {"type": "image", "image": found}
    content = image_content(found, what)
    return {"type": "image", "base64": base64.b64encode(content).decode()}


def image_content(image: Any, what: str) -> bytes:
    """The bytes of an image file.

    Args:
        image: one of FORMS.
        what: gave it, for errors.

    Raises:
        ValueError: it is none, or its file cannot be read.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise ValueError(f"{what} gave an image that cannot be read: {error}") from error
    if hasattr(image, "__array_interface__") and not hasattr(image, "save"):
        image = _from_array(image, what)
    if not hasattr(image, "save"):
        raise ValueError(f"{what} gave an image of type {type(image).__name__}, need {FORMS}")
    written = BytesIO()
    image.save(written, format="PNG", compress_level=1)
    return written.getvalue()


def _from_array(array: Any, what: str) -> Any:
    # Imported where there is an array: text does without.
    from PIL import Image

    shape = tuple(array.shape)
    colored = len(shape) == 3 and shape[2] == 3
    if str(array.dtype) != "uint8" or not (colored or len(shape) == 2):
        raise ValueError(f"{what} gave an array of {array.dtype} {shape} as an image, need {FORMS}")
    return Image.fromarray(array)
