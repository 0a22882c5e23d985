"""Chat messages to token ids through the tokenizer's template; user text stays plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2

from oxrl.data.rows import Json, Record
from oxrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
Messages = tuple[Message, ...]
ROLES = ("system", "developer", "user", "assistant", "tool")
EXPECTED_MESSAGES = (
    'a list of {"role": ' + " | ".join(f'"{role}"' for role in ROLES) + ', "content": text}'
)


class TemplateError(DataError):
    """The chat template cannot be used for some messages; who knows their row adds it."""


def read_messages(record: Record, value: Json, *, what: str, role: str = "user") -> Messages:
    """Check messages as a data file holds them.

    Args:
        value: a list of messages, or a text: one message of `role`.
        what: its name in errors.

    Raises:
        DataError: another type, an unknown role or key, or text that is no valid Unicode; names the
            record.
    """
    expected = f"{what}: {EXPECTED_MESSAGES}, or text"
    items = [{"role": role, "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list):
        record.fail(f"{what} is {type(value).__name__}", expected)
    messages: list[Message] = []
    for number, item in enumerate(items, start=1):
        name = f"message {number} of {what}"
        if not isinstance(item, dict) or set(item) != {"role", "content"}:
            record.fail(f"{name} is {str(item)[:120]}", expected)
        content = item["content"]
        if item["role"] not in ROLES or not isinstance(content, str):
            kinds = f"role {item['role']!r} and content of type {type(content).__name__}"
            record.fail(f"{name} has {kinds}", expected)
        try:
            content.encode("utf-8")
        except UnicodeEncodeError as error:
            surrogate = f"a lone surrogate {error.object[error.start]!a} at {error.start}"
            record.fail(f"{name} holds {surrogate}", "text that can be written as UTF-8")
        messages.append({"role": item["role"], "content": content})
    return tuple(messages)


class ChatEncoder:
    """Renders and encodes messages as the tokenizer's chat template says, with one difference.

    The text of a special token inside a message ("<|im_end|>" typed by a user) is encoded as the
    plain text that it is: it is hidden behind a placeholder while the template renders, and encoded
    apart. Messages without such text get exactly the ids of `tokenizer.apply_chat_template`.
    `hidden` counts the texts that were hidden so far.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use an "
                "instruction-tuned model, or set model.chat_template to a Jinja file"
            )
        self._tokenizer = tokenizer
        self.hidden = 0
        self.stop_text = str(tokenizer.eos_token)
        special = set(tokenizer.all_special_tokens)
        for token in tokenizer.added_tokens_decoder.values():
            if token.special:
                special.add(token.content)
        # The unknown token stands for ordinary text.
        control = sorted(special - {str(tokenizer.unk_token)})
        self.special_ids = frozenset(map(int, tokenizer.convert_tokens_to_ids(control)))  # pyright: ignore
        # One special token may be the start of another.
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def hide(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Put placeholders where messages hold the text of a special token.

        Returns:
            The messages as they can be rendered, and what each placeholder stands for.
        """
        text = "\0".join(message["content"] for message in messages)
        if not self._special.search(text):
            return list(messages), {}
        # Private-use characters: no template strips or splits them. The number avoids what the text
        # already holds.
        number = 0
        while f"\ue000{number}:" in text:
            number += 1
        hidden: dict[str, str] = {}

        def placeholder(match: re.Match[str]) -> str:
            key = f"\ue000{number}:{len(hidden)}\ue001"
            hidden[key] = match.group()
            self.hidden += 1
            return key

        shown: list[Message] = []
        for message in messages:
            content = self._special.sub(placeholder, message["content"])
            shown.append({**message, "content": content})
        return shown, hidden

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """Write messages as text, as the template does.

        Args:
            generation_prompt: end where the assistant starts to write.

        Raises:
            TemplateError: the template refuses the messages.
        """
        try:
            return self._tokenizer.apply_chat_template(  # pyright: ignore
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            refused = f"the chat template refuses messages with roles ({roles}): {error}"
            raise TemplateError(refused) from error

    def encode(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        """Token ids of rendered text; what stands behind a placeholder is encoded as plain text."""
        pieces = [text]
        if hidden:
            placeholders = "|".join(map(re.escape, hidden))
            pieces = re.split(f"({placeholders})", text)  # a group keeps what it matched
        ids: list[int] = []
        for piece in pieces:
            ids += self._tokenizer.encode(
                hidden.get(piece, piece),
                add_special_tokens=False,
                split_special_tokens=piece in hidden,
            )
        return ids

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation so far, ending where the assistant starts to write."""
        shown, hidden = self.hide(messages)
        return self.encode(self.render(shown, generation_prompt=True), hidden)
