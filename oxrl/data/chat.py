"""Chat messages to token ids through the tokenizer's template; user text stays plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

import jinja2

from oxrl.data.messages import (
    MessageList,
    MessageSequence,
    Tools,
    message_texts,
    texts_of,
    with_texts,
)
from oxrl.errors import DataError
from oxrl.modelfiles.chat_templates import DAY, TEMPLATE_FILE, suggestion
from oxrl.types import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Stands for what the assistant wrote while something is rendered: text that no template touches.
MARK = "OxrlMarkOfATurn"
# Without any of these a template only walks over the messages that it is given.
CAN_REPEAT = re.compile(r"range|macro|recursive|\*|center|indent|lipsum|\d{5,}")
# What stands before the words of an assistant who speaks first, in the words of an error.
BEGINS = (
    "a conversation that the assistant begins (put a message of the user or the system before its "
    "words, or set model.chat_template to one that can begin with them)"
)
# What rendering a template raises, which is a program, of messages and tools that are anything.
UNWRITABLE = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateError(DataError):
    """The chat template cannot be used for some messages; who knows their row adds it."""


class Overlong(DataError):
    """A text of more tokens than anybody would read, by its characters: it was not encoded."""


class ChatEncoder:
    """Renders and encodes messages as the tokenizer's chat template says, with one difference.

    The text of a special token inside a message ("<|im_end|>" typed by a user) is encoded as the
    plain text that it is: it is hidden behind a placeholder while the template renders, and encoded
    apart. Messages without such text get exactly the ids of `tokenizer.apply_chat_template`.
    A template that reads the clock is told one moment: the start of the tokenizer's day, else that
    in which this was made. `hidden` counts the texts that were hidden so far; `longest` is the most
    characters of a token; `most` the tokens of a text that is read, None: any number.

    Args:
        tokenizer: of the model that reads the ids.

    Raises:
        DataError: the tokenizer has no chat template, or one that does not end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use an "
                "instruction-tuned model, or set model.chat_template to a Jinja file"
            )
        template = tokenizer.chat_template
        if isinstance(template, str) and CAN_REPEAT.search(template):
            from oxrl.data.template_trial import require_end  # most only walk over the messages

            require_end(template)
        self._tokenizer = tokenizer
        day = getattr(tokenizer, DAY, None)
        self._moment = datetime.fromisoformat(day) if day else datetime.now()
        self.hidden = 0
        self.most: int | None = None
        self.stop_text = str(tokenizer.eos_token)
        # Characters of the longest token: a text of more for each has more tokens.
        self.longest = max(map(len, tokenizer.get_vocab()))
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        special.update(tokenizer.all_special_tokens)
        # The unknown token stands for ordinary text, unless it is what ends a text too.
        control = sorted(special - ({str(tokenizer.unk_token)} - {self.stop_text}))
        self.special_ids = frozenset(map(int, tokenizer.convert_tokens_to_ids(control)))  # pyright: ignore
        # One special token may be the start of another.
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end a reply: the tokenizer's end token, and the one that the template
        puts behind what the assistant writes, which may be another.
        """
        talk = ({"role": "user", "content": "x"}, {"role": "assistant", "content": MARK})
        try:
            behind = self.render(talk, generation_prompt=False).rpartition(MARK)[2]
        except TemplateError:
            behind = ""
        known = {*self.special_ids, *self._tokenizer.added_tokens_decoder}
        marks = [token for token in self.encode(behind, {}) if token in known]
        return sorted({int(self._tokenizer.eos_token_id), *marks[:1]})  # pyright: ignore

    def hide(self, messages: MessageSequence) -> tuple[MessageList, dict[str, str]]:
        """Put placeholders where messages hold the text of a special token.

        Args:
            messages: in one form, as `read_messages` makes them; not changed. What is hidden is
                added to `hidden`.

        Returns:
            The messages as they can be rendered, and what each placeholder stands for.
        """
        text = "\0".join(part for message in messages for part in texts_of(message))
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

        def replaced(part: str) -> str:
            return self._special.sub(placeholder, part)

        return [with_texts(message, replaced) for message in messages], hidden

    def render(
        self, messages: MessageSequence, *, generation_prompt: bool, tools: Tools = ()
    ) -> str:
        """Write messages as text, as the template does.

        Args:
            messages: with special tokens hidden, where there may be any.
            generation_prompt: end where the assistant starts to write.
            tools: definitions of the functions that the assistant may call.

        Returns:
            The text, with the template's special tokens in it.

        Raises:
            TemplateError: the template refuses the messages or tools, or leaves out what one says.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(  # pyright: ignore
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                strftime_now=self._moment.strftime,
            )
        except UNWRITABLE as error:
            roles = ", ".join(message["role"] for message in messages)
            file = getattr(self._tokenizer, TEMPLATE_FILE, self._tokenizer.name_or_path)
            what = f"messages with roles ({roles})" if roles else BEGINS
            raise TemplateError(f"the chat template refuses {what}: {error} ({file})") from error
        require_content(messages, text)
        return text

    def encode(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        """Encode rendered text; what stands behind a placeholder is encoded as plain text.

        Args:
            text: rendered; special tokens in it are encoded as such.
            hidden: placeholder -> what it stands for, of `hide`; empty: nothing is hidden.

        Raises:
            TemplateError: the tokenizer refuses the text.
            Overlong: it has more than `most` tokens, whatever they are.
        """
        if self.most is not None and len(text) > self.most * self.longest:
            raise Overlong(f"{len(text):,} characters are more than {self.most:,} tokens")
        pieces = [text]
        if hidden:
            placeholders = "|".join(map(re.escape, hidden))
            pieces = re.split(f"({placeholders})", text)  # a group keeps what it matched
        ids: list[int] = []
        for piece in pieces:
            try:
                ids += self._tokenizer.encode(
                    hidden.get(piece, piece),
                    add_special_tokens=False,
                    split_special_tokens=piece in hidden,
                )
            except (TypeError, ValueError) as error:  # half of a pair of surrogates, say
                raise TemplateError(f"the tokenizer refuses {piece[:80]!r}: {error}") from error
        return ids

    def encode_prompt(self, messages: MessageSequence, tools: Tools = ()) -> list[int]:
        """Encode the conversation so far, ending where the assistant starts to write.

        Args:
            messages: in one form; special tokens in them are text.
            tools: definitions of the functions that the assistant may call.

        Raises:
            TemplateError: the template refuses the messages, or leaves out what one says.
        """
        shown, hidden = self.hide(messages)
        return self.encode(self.render(shown, generation_prompt=True, tools=tools), hidden)

    def other_template(self) -> str:
        """Suggest a `model.chat_template`, in words, where this template cannot be used."""
        return suggestion(self._tokenizer)


def reply_text(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop_token_ids: TokenIds
) -> str:
    """The text of a reply: all that was sampled, but for padding and what ends it.

    Other special tokens may mean something, as `<tool_call>` does, and stay.

    Args:
        tokenizer: of the policy.
        token_ids: that it sampled.
        stop_token_ids: tokens that end a reply.
    """
    ends = {tokenizer.pad_token_id, tokenizer.eos_token_id, *stop_token_ids}  # pyright: ignore
    return str(tokenizer.decode([token for token in token_ids if token not in ends]))


def require_content(messages: MessageSequence, text: str) -> None:
    """Refuse a rendered conversation in which the text of a message does not stand.

    White space may differ. Templates that rewrite earlier replies have an error of their own where
    that matters, and reasoning may be left out. What a tool returned may be written otherwise.

    Args:
        messages: as they were given to the template.
        text: what it made of them.

    Raises:
        TemplateError: a message says what the model would not see.
    """
    for number, message in enumerate(messages, start=1):
        earlier = message["role"] == "assistant" and number < len(messages)
        if earlier or message["role"] == "tool":
            continue
        for content in message_texts(message):
            said = content.rpartition("</think>")[2].strip()
            if said in text or "".join(said.split()) in "".join(text.split()):
                continue
            raise TemplateError(
                f"the chat template leaves out what message {number} (role {message['role']}) "
                f"says, so the model would not see it: {said[:80]!r}; set model.chat_template to "
                f"one that writes it\n  rendered: {text[:200]!r}"
            )
