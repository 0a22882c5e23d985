"""Prompts to sample from: data rows with the chat template applied."""

from __future__ import annotations

import json
from collections.abc import Sequence

from oxrl.data.chat import ChatEncoder
from oxrl.data.dataset import Dataset, Dropped, Measured, ReadOptions
from oxrl.data.messages import (
    EXPECTED_MESSAGES,
    images_of,
    read_messages,
    read_tools,
    text_of,
)
from oxrl.data.rows import OTHERS, Record, content_uid
from oxrl.types import Prompt

EXPECTED = (
    f'{{"prompt": text or {EXPECTED_MESSAGES}, "answer": any JSON value, "uid": optional text, '
    f'"source": optional text, ...}}; other fields become metadata{OTHERS}'
)


class PromptDataset(Dataset[Prompt]):
    """Prompts with their token ids, from rows of the form `EXPECTED`.

    `report` counts duplicate_uids too.
    """

    noun = "prompt"
    counts = ("duplicate_uids",)

    @classmethod
    def check(cls, record: Record, first: Record) -> None:
        """Refuse a file of mixed layouts, which is a mistake in its making, rather than guess."""
        for key in ("prompt", "answer"):
            expected = key in first.fields
            if (key in record.fields) != expected:
                unlike = f"no {key!r}" if expected else f"{key!r}, which {first.place} has not"
                record.fail(unlike, EXPECTED)
        prompt = record.fields.get("prompt")
        if isinstance(prompt, str) != isinstance(first.fields.get("prompt"), str):
            kind = type(prompt).__name__
            record.fail(f"its prompt is {kind}, unlike that of {first.place}", EXPECTED)

    @classmethod
    def encode(cls, record: Record, encoder: ChatEncoder, options: ReadOptions) -> list[Prompt]:
        """Encode the prompt of a row; fields that are not oxRL's own become metadata."""
        if "prompt" not in record.fields:
            record.fail("no 'prompt'", EXPECTED)
        messages = read_messages(record, record.fields["prompt"], what="prompt")
        if messages and messages[-1]["role"] == "assistant":
            ends = "a prompt that ends where the assistant answers"
            record.fail("the prompt ends with an assistant message", ends)
        texts = [text_of(message) for message in messages if message["role"] != "system"]
        images = images_of(messages)
        if not images and not any(map(str.strip, texts)):
            raise Dropped("empty")
        metadata = dict(record.fields)
        text = metadata.pop("prompt")
        answer = metadata.pop("answer", None)
        uid = metadata.pop("uid", None)
        source = metadata.pop("source", None)
        token_ids = tuple(encoder.encode_prompt(messages, read_tools(record)))
        if not isinstance(source, str | None) or not isinstance(uid, str | int | None):
            kinds = f"uid is {type(uid).__name__}, source is {type(source).__name__}"
            record.fail(kinds, EXPECTED)
        try:
            computed = content_uid(text, answer)
            json.dumps(metadata)
        except (TypeError, ValueError) as error:
            record.fail(f"a field is not JSON: {error}", EXPECTED)
        prompt = Prompt(
            uid=computed if uid is None else str(uid),
            messages=messages,
            token_ids=token_ids,
            answer=answer,
            images=images,
            source=source or "",
            metadata=metadata,
            plain=isinstance(text, str),
        )
        return [prompt]

    @classmethod
    def measure(cls, units: Sequence[Prompt]) -> Measured:
        """Measure the length of the prompt with its template."""
        return len(units[0].token_ids), {}
