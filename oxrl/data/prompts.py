"""Prompts to sample from: a JSONL or Parquet file, its chat template applied, in a seeded endless
order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from oxrl.data.chat import EXPECTED_MESSAGES, ChatEncoder, Message, read_messages
from oxrl.data.dataset import Dataset
from oxrl.data.rows import Row, content_uid
from oxrl.types import Prompt

EXPECTED = (
    f'{{"prompt": text or {EXPECTED_MESSAGES}, "answer": any JSON value, "uid": optional text, '
    '"source": optional text, ...}; other fields become metadata'
)


class PromptDataset(Dataset[Prompt]):
    """Prompts with their token ids, from rows of the form `EXPECTED`; `report` counts
    duplicate_uids too.
    """

    noun = "prompt"
    counts = ("duplicate_uids",)

    @classmethod
    def check(cls, row: Row, first: Row) -> None:
        """A file of mixed layouts is a mistake in its making: say so rather than guess."""
        for key in ("prompt", "answer"):
            if (key in row.fields) != (key in first.fields):
                row.fail(
                    f"no {key!r}"
                    if key in first.fields
                    else f"{key!r}, which {first.place} has not",
                    EXPECTED,
                )
        if isinstance(row.fields.get("prompt"), str) != isinstance(first.fields.get("prompt"), str):
            row.fail(
                f"its prompt is {type(row.fields.get('prompt')).__name__}, unlike that of {first.place}",
                EXPECTED,
            )

    @classmethod
    def encode(cls, row: Row, encoder: ChatEncoder) -> list[Prompt] | str:
        if "prompt" not in row.fields:
            row.fail("no 'prompt'", EXPECTED)
        messages = read_messages(row, row.fields["prompt"], what="prompt")
        if messages and messages[-1]["role"] == "assistant":
            row.fail(
                "the prompt ends with an assistant message",
                "a prompt that ends where the assistant answers",
            )
        if not any(
            message["content"].strip() for message in messages if message["role"] != "system"
        ):
            return "empty"
        return [_to_prompt(row, messages, tuple(encoder.encode_prompt(messages)))]

    @classmethod
    def measure(cls, units: Sequence[Prompt]) -> tuple[int, Mapping[str, int]]:
        return len(units[0].token_ids), {}


def _to_prompt(row: Row, messages: tuple[Message, ...], token_ids: tuple[int, ...]) -> Prompt:
    rest = dict(row.fields)
    text, answer, uid, source = (
        rest.pop(key, None) for key in ("prompt", "answer", "uid", "source")
    )
    if not isinstance(source, str | None) or not isinstance(uid, str | int | None):
        row.fail(f"uid is {type(uid).__name__}, source is {type(source).__name__}", EXPECTED)
    try:
        computed = content_uid(text, answer)
        json.dumps(rest)
    except (TypeError, ValueError) as error:
        row.fail(f"a field is not JSON: {error}", EXPECTED)
    known = computed if uid is None else str(uid)
    return Prompt(
        uid=known,
        messages=messages,
        token_ids=token_ids,
        answer=answer,
        source=source or "",
        metadata=rest,
    )
