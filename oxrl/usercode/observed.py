"""Images in what an environment says: arrays, PIL images and files become PNG in base64.

An environment may write an image as an array, which no line of JSON holds. What leaves its process
is text, and the same picture is always the same text.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

Part = Mapping[str, Any]
# What an image is called once it is known: the SHA-256 of its bytes.
NAME = re.compile("[0-9a-f]{64}")
FORMS = "an array of uint8 [height, width, 3] or [height, width], a PIL image, a path, or bytes"


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
        part = cast(Part, item)
        kind = part.get("type")
        if kind == "image":
            parts.append(_as_image(part, what))
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
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
    if isinstance(found, str) and NAME.fullmatch(found):
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
