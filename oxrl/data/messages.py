"""Chat messages as data files hold them, in any of the usual forms, read into one form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from oxrl.data.rows import Fields, Json, JsonArray, JsonObject, Record
from oxrl.types import ROLES

Message = Fields
Messages = tuple[Message, ...]
MessageList = list[Message]
MessageSequence = Sequence[Message]
Tools = tuple[Message, ...]

EXPECTED_MESSAGES = (
    'a list of {"role": ' + " | ".join(f'"{role}"' for role in ROLES) + ', "content": text}'
)
# Who speaks in ShareGPT's {"from", "value"}, and what these are called here.
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
} | {role: role for role in ROLES}
# Texts beside the content that a chat template may use; REASONING ones are part of a reply.
REASONING = ("reasoning_content", "reasoning", "thinking")
TEXTS = ("name", "tool_call_id", *REASONING)
DETAILS = f"beside them {', '.join((*TEXTS, 'tool_calls'))}"
TEXT_PART = '{"type": "text", "text": ...}'
TEXT_ALONE = "text alone: drop the row or the column"
# Larger floats are not sure to be the whole numbers that they were.
MOST_WHOLE = 2**53
EXPECTED_CALLS = '[{"function": {"name": text, "arguments": {...}}}]'
EXPECTED_TOOLS = '[{"type": "function", "function": {"name": text, "parameters": {...}}}]'


def read_messages(record: Record, value: Json, *, what: str, role: str = "user") -> Messages:
    """Check messages as a data file holds them, and bring them into one form.

    Args:
        record: the row that they are in, for messages of errors.
        value: a list of messages, one message, or a text: one message of `role`.
        what: its name in errors.
        role: of a message that is given as text alone.

    Returns:
        Messages whose content is text, with the further keys that they have; of a record with
            images, a message that holds one has parts.

    Raises:
        DataError: another type, an unknown role or key, an image, or text that is no valid Unicode;
            names the record.
    """
    expected = f"{what}: {EXPECTED_MESSAGES} (or from and value), {DETAILS}; or text"
    items = [{"role": role, "content": value}] if isinstance(value, str) else value
    if isinstance(items, dict) and ("role" in items or "from" in items):
        items = [items]
    if not isinstance(items, list):
        record.fail(f"{what} is {type(value).__name__}", expected)
    messages: MessageList = []
    for number, item in enumerate(items, start=1):
        name = f"message {number} of {what}"
        if not isinstance(item, dict):
            record.fail(f"{name} is {str(item)[:120]}", expected)
        messages.append(_message(record, item, name, expected))
    return tuple(messages)


def read_tools(record: Record) -> Tools:
    """Read the definitions of functions in a row's field `tools`: a list, or JSON text of one.

    Args:
        record: the row.

    Returns:
        Each as {"type": "function", "function": {...}}; empty: it has none.

    Raises:
        DataError: it is neither; names the row.
    """
    value = _as_any_table(record.fields.get("tools"))
    if isinstance(value, str) and value.strip():
        value = _parsed(record, value, "tools", EXPECTED_TOOLS)
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        record.fail(f"tools is {type(value).__name__}", EXPECTED_TOOLS)
    tools: list[Fields] = []
    for tool in value:
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(tools)


def texts_of(message: Json) -> Iterator[str]:
    """Yield every text inside a message but its role.

    Args:
        message: a message, or any part of one.

    Returns:
        Texts in the order in which they stand there; the keys of mappings are none.
    """
    if isinstance(message, str):
        yield message
    elif isinstance(message, Mapping):
        for key, value in message.items():
            if key != "role":
                yield from texts_of(value)
    elif isinstance(message, list | tuple):
        for value in message:
            yield from texts_of(value)


def with_texts(message: Json, change: Callable[[str], str]) -> Json:
    """Return the message with every text inside it but its role changed.

    Args:
        message: a message, or any part of one; not changed.
        change: makes a text of a text.

    Returns:
        A copy of the same form; tuples become lists.
    """
    if isinstance(message, str):
        return change(message)
    if isinstance(message, Mapping):
        changed = {
            key: value if key == "role" else with_texts(value, change)
            for key, value in message.items()
        }
        return changed
    if isinstance(message, list | tuple):
        return [with_texts(value, change) for value in message]
    return message


def reasoning_of(message: Message) -> str:
    """Return the thoughts that a reply has apart from its content.

    Args:
        message: of the assistant.

    Returns:
        The first of the fields REASONING that holds anything; empty: none does.
    """
    return next((message[key] for key in REASONING if message.get(key)), "")


def _message(record: Record, item: Fields, name: str, expected: str) -> Message:
    """Read one message into our form."""
    # Tables give every message every key.
    given = {key: value for key, value in item.items() if value not in (None, [], {})}
    speaker = given.pop("role", given.pop("from", None))
    content = given.pop("content", given.pop("value", None))
    calls = given.pop("tool_calls", None)
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    strange = [key for key in given if key not in TEXTS]
    if strange:
        record.fail(f"{name} is {str(dict(item))[:120]}, with {', '.join(strange)}", expected)
    if speaker == "function_call" and calls is None:
        calls = _parsed(record, content, f"{name}, a function call,", EXPECTED_CALLS)
        content = None
    if content is None and calls is not None:
        content = ""
    text = _content(record, content, name, role)
    if role is None or text is None:
        kinds = f"role {speaker!r} and content of type {type(content).__name__}"
        record.fail(f"{name} has {kinds}", expected)
    for key, value in given.items():
        if not isinstance(value, str):
            record.fail(f"{key} of {name} is {type(value).__name__}", expected)
    message: JsonObject = {"role": role, "content": text, **given}
    if calls is not None:
        if role != "assistant":
            record.fail(f"{name} has tool_calls and role {speaker!r}", "calls by the assistant")
        message["tool_calls"] = _calls(record, calls, name)
    for part in texts_of(message):
        _check_unicode(record, part, name)
    return message


def _content(record: Record, content: Json, name: str, role: str | None) -> Json:
    """Text; parts of text and images, neighbouring texts joined; None where it is neither."""
    parts = content if record.images and isinstance(content, list) else []
    if not any(isinstance(part, dict) and part.get("type") == "image" for part in parts):
        return _text(record, content, name)
    found: JsonArray = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "image":
            found.append({"type": "image", "image": part["image"]})
            continue
        text = _text(record, [part], name) or ""
        if found and found[-1]["type"] == "text":
            text = found.pop()["text"] + text
        found.append({"type": "text", "text": text})
    if role == "assistant":
        record.fail(f"{name} holds an image, and is the assistant's", "images in questions alone")
    return found


def text_of(message: Message) -> str:
    """Return the text of a message, without its images.

    Args:
        message: in one form.

    Returns:
        Its texts, joined as they stand.
    """
    return "".join(message_texts(message))


def message_texts(message: Message) -> list[str]:
    """Return the texts of a message's content: one, or those between its images.

    Args:
        message: in one form.

    Returns:
        At least one text where the content is one; perhaps none where there are images alone.
    """
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def images_of(messages: Iterable[Message]) -> tuple[str, ...]:
    """List the names of the images in messages, in order; empty for those that have none yet.

    Args:
        messages: in one form, any number.
    """
    names: list[str] = []
    for message in messages:
        if not isinstance(message["content"], str):
            images = [part for part in message["content"] if part["type"] == "image"]
            names += [part.get("image", "") for part in images]
    return tuple(names)


def _text(record: Record, content: Json, name: str) -> str | None:
    """Text, also where it comes in parts; None where it is something else."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            record.fail(f"{name} holds a part {str(part)[:80]}", f"parts {TEXT_PART}")
        kind = part.get("type") or next((key for key, value in part.items() if value), "nothing")
        if kind not in ("text", "input_text", "output_text"):
            record.fail(f"{name} holds a part of type {kind}: models here read text", TEXT_ALONE)
        if not isinstance(part.get("text"), str):
            record.fail(f"{name} holds a part without a text", f"parts {TEXT_PART}")
        texts.append(part["text"])
    return "".join(texts)


def _calls(record: Record, calls: Json, name: str) -> list[JsonObject]:
    """Return calls of functions with arguments as objects, which chat templates expect."""
    found: list[JsonObject] = []
    for call in calls if isinstance(calls, list) else [calls]:
        inner = call.get("function") or call if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            record.fail(f"tool_calls of {name} hold {str(call)[:120]}", EXPECTED_CALLS)
        arguments = _as_any_table(inner.get("arguments"))
        if isinstance(arguments, str):
            arguments = _parsed(record, arguments or "{}", f"arguments of {name}", EXPECTED_CALLS)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            record.fail(f"arguments of {name} are {kind}, not an object", EXPECTED_CALLS)
        function = {"name": inner["name"], "arguments": arguments}
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**kept, "type": "function", "function": function})
    return found


def _parsed(record: Record, text: Json, what: str, expected: str) -> Json:
    """Parse JSON text."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        record.fail(f"{what} is no JSON: {error}", expected)


def _as_any_table(value: Json) -> Json:
    """Return a value as it is whether or not its row went through a table, which cannot be told.

    Tables fill keys that only other rows have with null, and then hold whole numbers as floats. So
    null is left out, and a number without a fraction is whole. JSON text says what it says.
    """
    if isinstance(value, dict):
        return {key: _as_any_table(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_as_any_table(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < MOST_WHOLE:
        return int(value)
    return value


def _check_unicode(record: Record, text: str, name: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"a lone surrogate {error.object[error.start]!a} at {error.start}"
        record.fail(f"{name} holds {surrogate}", "text that can be written as UTF-8")
