"""Conversations to learn from: which tokens the assistant wrote, its stop token included, and which
were given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oxrl.data.chat import EXPECTED_MESSAGES, ChatEncoder, Message, TemplateError, read_messages
from oxrl.data.dataset import Dataset
from oxrl.data.rows import Row, content_uid

EXPECTED = (
    f'{{"messages": {EXPECTED_MESSAGES}}} or {{"prompt": text or messages, "completion": text}}'
)


@dataclass(frozen=True, kw_only=True)
class Example:
    """One conversation. `trained[t]` says that the assistant wrote `token_ids[t]`: it is a target
    of the loss.

    "<|user|>1+1<|end|><|assistant|>2<|end|>" has the mask 0 0 0 0 0 0 1 1: the reply and the token
    that stops it.
    """

    uid: str
    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]


class ConversationDataset(Dataset[Example]):
    """Conversations with loss masks, from rows of the form `EXPECTED`; a row with a blank reply is
    empty.

    Several assistant turns in a row are all learned. `report` counts trained_tokens too.
    """

    noun = "conversation"
    counts = ("trained_tokens",)

    @classmethod
    def encode(cls, row: Row, encoder: ChatEncoder) -> list[Example] | str:
        messages = _messages(row)
        return "empty" if has_blank_reply(messages) else [encode_conversation(messages, encoder)]

    @classmethod
    def measure(cls, units: Sequence[Example]) -> tuple[int, Mapping[str, int]]:
        return len(units[0].token_ids), {"trained_tokens": sum(units[0].trained)}


def has_blank_reply(messages: Sequence[Message]) -> bool:
    return any(
        message["role"] == "assistant" and not message["content"].strip() for message in messages
    )


def encode_conversation(
    messages: Sequence[Message], encoder: ChatEncoder, *, context: int = 0
) -> Example:
    """Token ids and loss mask of a conversation up to its last assistant turn; the first `context`
    messages are given.

    Each reply is encoded apart from what stands before it, as sampling produces it: prompt tokens,
    then reply tokens.

    Raises:
        TemplateError: the template rewrites earlier turns, or ends a reply without a special token.
    """
    shown, hidden = encoder.hide(messages)
    ids: list[int] = []
    trained: list[bool] = []
    done = ""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = encoder.render(shown[:turn], generation_prompt=True)
        after = encoder.render(shown[: turn + 1], generation_prompt=False)
        _require_prefix(
            done, before, "the conversation before a reply", "the same conversation one turn later"
        )
        _require_prefix(
            before, after, "the prompt for a reply", "the same conversation with the reply"
        )
        given = encoder.encode(before[len(done) :], hidden)
        reply = encoder.encode(after[len(before) :], hidden)
        stops = [position for position, token in enumerate(reply) if token in encoder.special_ids]
        if not stops:
            tail = after[len(before) :][-120:]
            raise TemplateError(
                "the chat template does not stop a reply with a special token, so the model would never learn to stop; "
                f"set model.chat_template to one that does\n  - rendered: ...{tail!r}\n  + expected: "
                f"...{tail + encoder.stop_text!r}"
            )
        ids += given + reply
        # What the template adds after the stop token (a line feed in ChatML) is never sampled, so
        # it is not learned.
        trained += [False] * len(given) + [
            turn >= context and position <= stops[-1] for position in range(len(reply))
        ]
        done = after
    return Example(
        uid=content_uid([dict(m) for m in messages]), token_ids=tuple(ids), trained=tuple(trained)
    )


def _require_prefix(prefix: str, text: str, prefix_name: str, text_name: str) -> None:
    if text.startswith(prefix):
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b),
        min(len(prefix), len(text)),
    )
    start = max(0, at - 40)
    raise TemplateError(
        f"the chat template changes earlier text when a turn is added (first difference at character {at}), so replies "
        f"cannot be told from what was given; set model.chat_template to one that keeps it\n"
        f"  {prefix_name}: ...{prefix[start : at + 60]!r}\n  {text_name}: ...{text[start : at + 60]!r}"
    )


def _messages(row: Row) -> tuple[Message, ...]:
    fields = row.fields
    if "messages" in fields:
        messages = read_messages(row, fields["messages"], what="messages")
    elif "prompt" in fields and isinstance(fields.get("completion"), str):
        messages = read_messages(row, fields["prompt"], what="prompt")
        messages += read_messages(row, fields["completion"], what="completion", role="assistant")
    else:
        row.fail("neither 'messages' nor 'prompt' with a text 'completion'", EXPECTED)
    if not any(message["role"] == "assistant" for message in messages):
        row.fail("no assistant message: nothing to learn", EXPECTED)
    return messages
