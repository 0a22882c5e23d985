"""Prompts to sample from: a JSONL or Parquet file, its chat template applied, in a seeded endless order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from oxrl.data.chat import EXPECTED_MESSAGES, ChatEncoder, Message, read_messages
from oxrl.data.dataset import Dataset, Encoded
from oxrl.data.rows import Row
from oxrl.types import Prompt

EXPECTED = (
    f'{{"prompt": text or {EXPECTED_MESSAGES}, "answer": any JSON value, "uid": optional text, '
    '"source": optional text, ...}; other fields become metadata'
)


def content_uid(*parts: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of `parts` as canonical JSON: the same row, the same uid.

    Raises:
        TypeError, ValueError: a part is not JSON.
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PromptDataset(Dataset[Prompt]):
    """Prompts with their token ids, from rows of the form `EXPECTED`; `report` counts duplicate_uids too."""

    noun = "prompt"
    counts = ("duplicate_uids",)

    @classmethod
    def encoding(cls, encoder: ChatEncoder) -> Callable[[Row], Encoded[Prompt] | str]:
        first: Row | None = None
        seen: set[str] = set()

        def encode(row: Row) -> Encoded[Prompt] | str:
            nonlocal first
            first = first or row
            _check_like_first(row, first)
            messages = _prompt_messages(row)
            if not any(message["content"].strip() for message in messages if message["role"] != "system"):
                return "empty"
            prompt = _to_prompt(row, messages, tuple(encoder.encode_prompt(messages)))
            again = prompt.uid in seen
            seen.add(prompt.uid)
            return Encoded(
                units=[prompt],
                tokens=len(prompt.token_ids),
                special_text=encoder.has_special_text(messages),
                counts={"duplicate_uids": again},
            )

        return encode


def _check_like_first(row: Row, first: Row) -> None:
    """A file of mixed layouts is a mistake in its making: say so rather than guess."""
    for key in ("prompt", "answer"):
        if (key in row.fields) != (key in first.fields):
            row.fail(f"no {key!r}" if key in first.fields else f"{key!r}, which {first.place} has not", EXPECTED)
    if isinstance(row.fields.get("prompt"), str) != isinstance(first.fields.get("prompt"), str):
        row.fail(f"its prompt is {type(row.fields.get('prompt')).__name__}, unlike that of {first.place}", EXPECTED)


def _prompt_messages(row: Row) -> tuple[Message, ...]:
    if "prompt" not in row.fields:
        row.fail("no 'prompt'", EXPECTED)
    messages = read_messages(row, row.fields["prompt"], what="prompt")
    if messages and messages[-1]["role"] == "assistant":
        row.fail("the prompt ends with an assistant message", "a prompt that ends where the assistant answers")
    return messages


def _to_prompt(row: Row, messages: tuple[Message, ...], token_ids: tuple[int, ...]) -> Prompt:
    metadata = dict(row.fields)
    text, answer, uid, source = (metadata.pop(key, None) for key in ("prompt", "answer", "uid", "source"))
    if not isinstance(source, str | None) or not isinstance(uid, str | int | None):
        row.fail(f"uid is {type(uid).__name__}, source is {type(source).__name__}", EXPECTED)
    try:
        computed = content_uid(text, answer)
        json.dumps(metadata)
    except (TypeError, ValueError) as error:
        row.fail(f"a field is not JSON: {error}", EXPECTED)
    return Prompt(
        uid=computed if uid is None else str(uid),
        messages=messages,
        token_ids=token_ids,
        answer=answer,
        source=source or "",
        metadata=metadata,
    )
