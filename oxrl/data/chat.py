"""Chat messages to token ids through the tokenizer's own template, with user text kept apart from
control tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from oxrl.data.rows import Row
from oxrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
ROLES = ("system", "developer", "user", "assistant", "tool")
EXPECTED_MESSAGES = (
    'a list of {"role": ' + " | ".join(f'"{role}"' for role in ROLES) + ', "content": text}'
)


class TemplateError(DataError):
    """The chat template cannot be used for some messages; who knows their row adds it."""


def read_messages(row: Row, value: Any, *, what: str, role: str = "user") -> tuple[Message, ...]:
    """`value`, a list of messages or a string (one message of `role`), checked.

    Raises:
        DataError: another type, an unknown role or key, or text that is no valid Unicode; names the
            row.
    """
    expected = f"{what}: {EXPECTED_MESSAGES}, or text"
    items = [{"role": role, "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list):
        row.fail(f"{what} is {type(value).__name__}", expected)
    for number, item in enumerate(items, start=1):
        name = f"message {number} of {what}"
        if not isinstance(item, dict) or set(item) != {"role", "content"}:
            row.fail(f"{name} is {str(item)[:120]}", expected)
        if item["role"] not in ROLES or not isinstance(item["content"], str):
            row.fail(
                f"{name} has role {item['role']!r} and content of type {type(item['content']).__name__}",
                expected,
            )
        try:
            item["content"].encode("utf-8")
        except UnicodeEncodeError as error:
            surrogate = f"a lone surrogate {error.object[error.start]!a} at {error.start}"
            row.fail(f"{name} holds {surrogate}", "text that can be written as UTF-8")
    return tuple({"role": item["role"], "content": item["content"]} for item in items)


class ChatEncoder:
    """Renders and encodes messages as the tokenizer's chat template says, with one difference.

    The text of a special token inside a message ("<|im_end|>" typed by a user) is encoded as the
    plain text that it is: it is hidden behind a placeholder while the template renders, and encoded
    apart. Messages without such text get exactly the ids of `tokenizer.apply_chat_template`.
    `hidden` counts the texts that were hidden so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruction-tuned model, "
                "or set model.chat_template to a Jinja file"
            )
        self._tokenizer, self.hidden, self.stop_text = tokenizer, 0, str(tokenizer.eos_token)
        special = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        special |= set(tokenizer.all_special_tokens)
        control = sorted(
            special - {str(tokenizer.unk_token)}
        )  # the unknown token stands for ordinary text
        self.special_ids = frozenset(int(i) for i in tokenizer.convert_tokens_to_ids(control))  # pyright: ignore
        # One special token may be the start of another.
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def hide(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Messages with special-token text replaced by placeholders, and what each placeholder
        stands for.
        """
        if not any(self._special.search(message["content"]) for message in messages):
            return list(messages), {}
        number = 0
        # Private-use characters: no template strips or splits them. The number avoids what the text
        # already holds.
        while any(f"\ue000{number}:" in message["content"] for message in messages):
            number += 1
        hidden: dict[str, str] = {}

        def placeholder(match: re.Match[str]) -> str:
            key = f"\ue000{number}:{len(hidden)}\ue001"
            hidden[key] = match.group()
            self.hidden += 1
            return key

        return [
            {**m, "content": self._special.sub(placeholder, m["content"])} for m in messages
        ], hidden

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The template's text for `messages`; with `generation_prompt` it ends where the assistant
        starts to write.

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
            raise TemplateError(
                f"the chat template refuses messages with roles ({roles}): {error}"
            ) from error

    def encode(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        """Token ids of rendered `text`; what stands behind a placeholder is encoded as plain
        text.
        """
        ids: list[int] = []
        # Splitting by a group keeps what it matched.
        for piece in (
            re.split("(" + "|".join(map(re.escape, hidden)) + ")", text) if hidden else [text]
        ):
            plain = piece in hidden
            ids += self._tokenizer.encode(
                hidden.get(piece, piece), add_special_tokens=False, split_special_tokens=plain
            )
        return ids

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the conversation so far, ending where the assistant starts to write."""
        shown, hidden = self.hide(messages)
        return self.encode(self.render(shown, generation_prompt=True), hidden)
