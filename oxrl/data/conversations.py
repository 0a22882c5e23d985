"""Conversations to learn from: which tokens the assistant wrote, and which were given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from oxrl.data.chat import ChatEncoder, TemplateError
from oxrl.data.dataset import Dataset, Dropped, Measured, ReadOptions
from oxrl.data.messages import (
    EXPECTED_MESSAGES,
    Message,
    MessageList,
    Messages,
    MessageSequence,
    Tools,
    images_of,
    read_messages,
    read_tools,
    reasoning_of,
)
from oxrl.data.prompts import PromptDataset
from oxrl.data.rows import OTHERS, Record, content_uid
from oxrl.types import Example, Prompt

EXPECTED = (
    f'{{"messages": {EXPECTED_MESSAGES}}} or {{"prompt": text or messages, "completion": text or '
    f"messages}}{OTHERS}"
)


class ConversationDataset(Dataset[Example]):
    """Conversations with loss masks, from rows of the form `EXPECTED`.

    A row with a blank reply is empty. Several assistant turns in a row are all learned. `report`
    counts trained_tokens too, and of actions how many numbers were clipped.
    """

    noun = "conversation"
    counts = ("trained_tokens", "clipped")

    @classmethod
    def encode(cls, record: Record, encoder: ChatEncoder, options: ReadOptions) -> list[Example]:
        """Encode the conversation of a row; of a model of actions, the actions that it shows."""
        if options.actions is not None:
            from oxrl.data.demonstrations import encode_demonstration  # most replies are text

            return [encode_demonstration(record, encoder, options.actions)]
        messages = _messages(record)
        if has_blank_reply(messages):
            raise Dropped("empty")
        return [encode_conversation(messages, encoder, tools=read_tools(record))]

    @classmethod
    def measure(cls, units: Sequence[Example]) -> Measured:
        """Measure the length of the conversation, and count the tokens that are learned."""
        (example,) = units
        counted = {"trained_tokens": sum(example.trained), "clipped": example.clipped}
        return len(example.token_ids), counted


class AnsweredPrompts(PromptDataset):
    """Prompts of rows that are given to imitate: what stands before the last reply.

    `answer` is the row's own where it has one, else that reply.
    """

    @classmethod
    def check(cls, record: Record, first: Record) -> None:
        """Accept every record: rows to imitate may have any of their layouts."""

    @classmethod
    def encode(cls, record: Record, encoder: ChatEncoder, options: ReadOptions) -> list[Prompt]:
        """Encode the prompt of a row to imitate: what stands before its last reply."""
        messages = _messages(record)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        asked = messages[: turns[-1]]
        fields = dict(record.fields)
        fields.pop("messages", None)
        if fields.get("answer") is None:
            fields["answer"] = messages[turns[-1]]["content"]
        text = fields.get("prompt")
        if not isinstance(text, str) or asked != ({"role": "user", "content": text},):
            fields["prompt"] = [dict(message) for message in asked]
        return super().encode(replace(record, fields=fields), encoder, options)


def replies_in(messages: MessageSequence) -> MessageList:
    """Return the messages of the assistant in a conversation, in order.

    Args:
        messages: of a conversation.
    """
    return [message for message in messages if message["role"] == "assistant"]


def has_blank_reply(messages: MessageSequence) -> bool:
    """True if a turn of the assistant holds nothing but white space, and no call.

    Args:
        messages: of a conversation, with text alone.
    """
    replies = replies_in(messages)
    return not all(reply["content"].strip() or reply.get("tool_calls") for reply in replies)


def split_prompt(record: Record, reply: Messages, expected: str) -> tuple[Messages, Messages]:
    """Tell what a reply answers from the reply itself, which often repeats some of it, or all.

    A reply that begins with the assistant's words goes on from the row's prompt. Any other one is a
    whole conversation, in which the prompt, or the end of it, is found: what stands up to there is
    answered.

    Args:
        record: the row, with a prompt.
        reply: messages to learn from or to judge.
        expected: what a row looks like, for the error.

    Returns:
        The messages that are answered, and those that answer them.

    Raises:
        DataError: the two cannot be told apart; names the row.
    """
    prompt = read_messages(record, record.fields["prompt"], what="prompt")
    size = len(prompt)
    nearest = sorted(range(1, len(reply)), key=lambda end: abs(end - size))
    ends = [end for end in nearest if reply[max(0, end - size) : end] == prompt[-end:]]
    goes_on = not reply or reply[0]["role"] in CONTINUES
    if ends and not goes_on:
        end = ends[0]
        return (prompt if end <= size else reply[:end]), reply[end:]
    if ends or not (goes_on or {message["role"] for message in prompt} == {"system"}):
        problem = "the prompt does not stand at the beginning of the conversation beside it"
        record.fail(problem, expected)
    return prompt, reply


def encode_conversation(
    messages: MessageSequence, encoder: ChatEncoder, *, context: int = 0, tools: Tools = ()
) -> Example:
    """Encode a conversation as token ids with a loss mask, up to its last assistant turn.

    Each reply is encoded apart from what stands before it, as sampling produces it: prompt tokens,
    then reply tokens.

    Args:
        messages: in one form; what follows the last one of the assistant is left out.
        encoder: of the tokenizer that the model reads.
        context: how many messages, from the first on, are given and not learned.
        tools: definitions of the functions that the assistant may call.

    Returns:
        Tokens and whether each is trained: those of replies are, up to the token that ends them;
        the uid follows from the content.

    Raises:
        TemplateError: the template rewrites earlier turns, leaves out a part of a reply, or ends it
            without a special token.
    """
    shown, hidden = encoder.hide(messages)
    ids: list[int] = []
    trained: list[bool] = []
    done = ""
    seen = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = encoder.render(shown[:turn], generation_prompt=True, tools=tools)
        after = encoder.render(shown[: turn + 1], generation_prompt=False, tools=tools)
        given = _continuation(encoder, done, before, EARLIER)
        written = _continuation(encoder, before, after, REPLY)
        _check_whole(shown[turn], written, encoder)
        given_ids = encoder.encode(given, hidden)
        reply_ids = encoder.encode(written, hidden)
        ids += given_ids + reply_ids
        # What the template adds after the stop token (a line feed in ChatML) is never sampled, so
        # it is not learned.
        learned = _length_to_stop(reply_ids, written, encoder)
        trained += [False] * len(given_ids) + [turn >= context] * learned
        trained += [False] * (len(reply_ids) - learned)
        done = after
        seen = turn
    known = [dict(message) for message in messages]
    uid = content_uid(known, list(tools)) if tools else content_uid(known)
    return Example(
        uid=uid,
        token_ids=tuple(ids),
        trained=tuple(trained),
        images=images_of(messages[:seen]),
    )


# Who speaks first in a reply that goes on from a prompt.
CONTINUES = ("assistant", "tool")
# What stands behind what, in the words of an error.
EARLIER = ("the conversation before a reply", "the same conversation one turn later")
REPLY = ("the prompt for a reply", "the same conversation with the reply")


def _check_whole(reply: Message, written: str, encoder: ChatEncoder) -> None:
    """Refuse a template that leaves out what a reply has beside its content."""
    parts = {"its reasoning": reasoning_of(reply).strip()}
    for call in reply.get("tool_calls", ()):
        parts["its tool_calls"] = call["function"]["name"]
    for what, text in parts.items():
        if text not in written:
            raise TemplateError(
                f"the chat template leaves out a part of a reply, {what}, so it would not be "
                f"learned; set model.chat_template {encoder.other_template()}\n"
                f"  missing: {text[:120]!r}\n  rendered: {written[:200]!r}"
            )


def _length_to_stop(reply: Sequence[int], text: str, encoder: ChatEncoder) -> int:
    """Count the tokens of a rendered reply up to and with its last special token."""
    ends = encoder.special_ids.union(encoder.ends)
    for length in range(len(reply), 0, -1):
        if reply[length - 1] in ends:
            return length
    tail = text[-120:]
    raise TemplateError(
        "the chat template does not stop a reply with a special token, so the model would never "
        "learn to stop; set model.chat_template to one that does\n"
        f"  - rendered: ...{tail!r}\n  + expected: ...{tail + encoder.stop_text!r}"
    )


def _continuation(encoder: ChatEncoder, prefix: str, text: str, names: tuple[str, str]) -> str:
    """Return the text that `text` adds to `prefix`, with which it has to begin."""
    if text.startswith(prefix):
        return text[len(prefix) :]
    at = len(os.path.commonprefix([prefix, text]))
    around = slice(max(0, at - 40), at + 60)
    raise TemplateError(
        "the chat template changes earlier text when a turn is added (first difference at "
        f"character {at}), so replies cannot be told from what was given; set model.chat_template "
        f"{encoder.other_template()}\n"
        f"  {names[0]}: ...{prefix[around]!r}\n  {names[1]}: ...{text[around]!r}"
    )


def _answered(record: Record) -> Messages:
    """Return the conversation of a row with a prompt and a completion."""
    fields = record.fields
    completion = fields.get("completion")
    if "prompt" not in fields or not isinstance(completion, str | list | dict):
        record.fail("neither 'messages' nor 'prompt' with a 'completion'", EXPECTED)
    reply = read_messages(record, completion, what="completion", role="assistant")
    prompt, rest = split_prompt(record, reply, EXPECTED)
    return prompt + rest


def _messages(record: Record) -> Messages:
    if "messages" not in record.fields:
        messages = _answered(record)
    else:
        messages = read_messages(record, record.fields["messages"], what="messages")
        roles = [message["role"] for message in messages]
        if "user" not in roles and record.fields.get("prompt") is not None:
            prompt, rest = split_prompt(record, messages, EXPECTED)
            messages = prompt + rest
    if not replies_in(messages):
        record.fail("no assistant message: nothing to learn", EXPECTED)
    return messages
