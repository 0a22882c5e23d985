"""The places of a row's images: in its messages, by a part or a marker, or before the text.

A row names its images in the column `images` (or `image`), in parts of its messages, or both. A
part without an image of its own, and the marker `<image>` in a text, show the next one of the
column. Where nothing shows those of the column, they come before the text of the first question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from oxrl.data.rows import Fields, Json, JsonArray, Record

MARKER = "<image>"
COLUMNS = ("images", "image")
# A conversation up to the reply, then replies, which may repeat it.
ASKING = ("messages", "prompt")
REPLIES = ("chosen", "rejected", "completion")
PART_TYPES = ("image", "image_url", "input_image")
# Fields of a part that hold its image.
SOURCES = ("image", "image_url", "path", "url", "base64", "bytes")
EXPECTED = (
    'as many images in the column "images" as parts {"type": "image"} or markers <image> show, or '
    "none of these: then they come before the text"
)

# A reference as a row has it -> the name of that image.
Take = Callable[[Json], str]


def with_images(record: Record, take: Take) -> Record:
    """Read a record's images, name them in the parts of its messages and drop their columns.

    Args:
        record: a row, in our words.
        take: reads an image.

    Returns:
        Another record, or this one where there is no image.

    Raises:
        DataError: images and the places where they are shown do not match; names the row.
    """
    fields = dict(record.fields)
    column: JsonArray = []
    marked = False
    for name in COLUMNS:
        if name in fields:
            marked = True
            value = fields[name]
            column += _listed(value)
            # Under their own name too, where data.columns names them.
            fields = {key: kept for key, kept in fields.items() if kept is not value}
    placing = _Placing(record, column, take, marked)
    asked = [name for name in ASKING if name in fields]
    known = [name for name in REPLIES if name in fields]
    replies = [name for name in known if not asked or _asks(fields[name])]
    for name in [*asked, *replies]:
        fields[name] = placing.conversation(fields[name], name)
    if column and not placing.placed:
        record.fail(f"{len(column)} images and no question to show them with", EXPECTED)
    changed = placing.placed or fields.keys() != record.fields.keys()
    return replace(record, fields=fields, images=True) if changed else record


def references(record: Record) -> JsonArray:
    """List every image that a row names, wherever; nothing is read.

    Args:
        record: one row, as the file has it.

    Returns:
        As the row has them: those of the columns first, then those in messages, in order; one may
        come twice.
    """
    found: JsonArray = []
    for name in COLUMNS:
        found += _listed(record.fields.get(name))
    for name in (*ASKING, *REPLIES):
        value = record.fields.get(name)
        for message in value if isinstance(value, list) else []:
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, list) else []:
                source = _source(part) if _is_image(part) else None
                if source is not None:
                    found.append(source)
    return found


@dataclass
class _Placing:
    """Puts the images of one row where they are shown, in one conversation after the other."""

    record: Record
    column: JsonArray
    take: Take
    marked: bool
    placed: int = 0

    def conversation(self, value: Json, name: str) -> Json:
        """Return messages, or the text of one question, with the images in their places."""
        if isinstance(value, str):
            messages: JsonArray = [{"role": "user", "content": value}]
        elif isinstance(value, Mapping):
            messages = [value]
        elif isinstance(value, list):
            messages = list(value)
        else:
            return value
        left = list(self.column)
        before = self.placed
        shown = [self._message(message, left) for message in messages]
        if left and len(left) == len(self.column):
            first = next((n for n, message in enumerate(shown) if _is_question(message)), None)
            if first is None:
                self.placed = before
                return value
            shown[first] = self._in_front(shown[first], left)
            left = []
        if left:
            nowhere = f"{len(left)} of {len(self.column)} images are shown nowhere"
            self.record.fail(f"{name}: {nowhere}", EXPECTED)
        return shown if self.placed > before else value

    def _message(self, message: Json, left: JsonArray) -> Json:
        """Return a message with its images read; takes those of the column that it shows."""
        if not isinstance(message, Mapping):
            return message
        key = "content" if "content" in message else "value"
        content = message.get(key)
        marked = self.marked and _is_question(message)
        if isinstance(content, str) and marked and MARKER in content:
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            return message
        parts: JsonArray = []
        for part in content:
            if _is_image(part):
                source = _source(part)
                parts.append(self._named(self._next(left) if source is None else source))
            elif marked and _has_marker(part):
                parts += self._split(part["text"], left)
            else:
                parts.append(part)
        return {**message, key: parts}

    def _split(self, text: str, left: JsonArray) -> JsonArray:
        """Split a text at its markers, with an image in the place of each."""
        first, *others = text.split(MARKER)
        parts: JsonArray = [{"type": "text", "text": first}] if first else []
        for other in others:
            parts.append(self._named(self._next(left)))
            if other:
                parts.append({"type": "text", "text": other})
        return parts

    def _in_front(self, message: Json, images: JsonArray) -> Json:
        key = "content" if "content" in message else "value"
        content = message[key]
        texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        return {**message, key: [*map(self._named, images), *texts]}

    def _next(self, left: JsonArray) -> Json:
        if not left:
            more = f"more images are shown than the {len(self.column)} of the column"
            self.record.fail(f"messages: {more}", EXPECTED)
        return left.pop(0)

    def _named(self, reference: Json) -> Json:
        self.placed += 1
        return {"type": "image", "image": self.take(reference)}


def _listed(value: Json) -> JsonArray:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_image(part: Json) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PART_TYPES


def _has_marker(part: Json) -> bool:
    text = part.get("text") if isinstance(part, Mapping) else None
    return isinstance(text, str) and MARKER in text


def _source(part: Fields) -> Json:
    """Return the image that a part names or holds; None where it shows one of the column."""
    for name in SOURCES:
        value = part.get(name)
        if value is None or value == "":
            continue
        if name == "image_url" and isinstance(value, Mapping):
            return value.get("url")
        return {name: value} if name in ("base64", "bytes") else value
    return None


def _is_question(message: Json) -> bool:
    """True if the message is a question to the model: its role is "user" or "human"."""
    if not isinstance(message, Mapping):
        return False
    return message.get("role", message.get("from")) in ("user", "human")


def _asks(value: Json) -> bool:
    return isinstance(value, list) and any(map(_is_question, value))
