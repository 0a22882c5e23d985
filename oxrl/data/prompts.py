"""Prompts to sample from: a JSONL or Parquet file, its chat template applied, in a seeded endless order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oxrl.data.chat import EXPECTED_MESSAGES, ChatEncoder, Message, read_messages
from oxrl.data.order import index_at
from oxrl.data.rows import Row, file_hash, read_rows
from oxrl.errors import DataError
from oxrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


class PromptDataset:
    """Prompts with their token ids, ready to sample from.

    `report` counts what happened to the rows: rows, kept, overlong, empty, duplicate_uids, special_text (rows whose
    messages hold the text of a special token, encoded as text), longest (tokens), and the file's path and sha256.
    """

    def __init__(self, prompts: Sequence[Prompt], report: Mapping[str, int | str]) -> None:
        self._prompts = list(prompts)
        self.report = dict(report)

    @classmethod
    def load(
        cls,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int | None = None,
        overlong: Literal["drop", "error"] = "drop",
        limit: int | None = None,
    ) -> PromptDataset:
        """Read, check, render and encode every row of `path`.

        Args:
            path: .jsonl or .parquet; one row is `EXPECTED`.
            tokenizer: with a chat template.
            max_prompt_tokens: longest prompt allowed, in tokens after templating; None is no limit.
            overlong: what to do with longer ones: drop and count them, or fail.
            limit: stop after this many kept prompts.

        Raises:
            DataError: the file cannot be read, a row is malformed, or no prompt is left; names row or counts.
        """
        encoder = ChatEncoder(tokenizer)
        prompts: list[Prompt] = []
        counts = dict.fromkeys(("rows", "kept", "overlong", "empty", "duplicate_uids", "special_text", "longest"), 0)
        first: Row | None = None
        seen: set[str] = set()
        for row in read_rows(path):
            if limit is not None and len(prompts) >= limit:
                break
            counts["rows"] += 1
            first = first or row
            _check_like_first(row, first)
            messages = _prompt_messages(row)
            if not any(message["content"].strip() for message in messages if message["role"] != "system"):
                counts["empty"] += 1
                continue
            prompt = _to_prompt(row, messages, encoder)
            length = len(prompt.token_ids)
            if max_prompt_tokens is not None and length > max_prompt_tokens:
                if overlong == "error":
                    row.fail(
                        f"the prompt has {length} tokens, more than max_prompt_tokens={max_prompt_tokens}",
                        "shorter prompts, a larger data.max_prompt_tokens, or data.overlong: drop",
                    )
                counts["overlong"] += 1
                continue
            counts["special_text"] += encoder.has_special_text(messages)
            counts["longest"] = max(counts["longest"], length)
            counts["duplicate_uids"] += prompt.uid in seen
            seen.add(prompt.uid)
            prompts.append(prompt)
        counts["kept"] = len(prompts)
        if not prompts:
            raise DataError(
                f"{path}: no prompt is left to train on: {counts['rows']} rows, {counts['empty']} empty, "
                f"{counts['overlong']} longer than max_prompt_tokens={max_prompt_tokens}"
            )
        return cls(prompts, {"path": str(path), "sha256": file_hash(path), **counts})

    def __len__(self) -> int:
        return len(self._prompts)

    def at(self, draw: int, *, seed: int) -> Prompt:
        """The prompt at global position `draw` of the shuffled, endless order of `seed`."""
        return self._prompts[index_at(draw, len(self._prompts), seed)]

    def in_order(self) -> list[Prompt]:
        """Every prompt once, in file order: what evaluation reads."""
        return list(self._prompts)


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


def _to_prompt(row: Row, messages: tuple[Message, ...], encoder: ChatEncoder) -> Prompt:
    answer = row.fields.get("answer")
    uid, source = row.fields.get("uid"), row.fields.get("source") or ""
    metadata = {key: value for key, value in row.fields.items() if key not in ("prompt", "answer", "uid", "source")}
    if not isinstance(source, str) or not (uid is None or isinstance(uid, str | int)):
        row.fail(f"uid is {type(uid).__name__}, source is {type(source).__name__}", EXPECTED)
    try:
        computed = content_uid(row.fields["prompt"], answer)
        json.dumps(metadata)
    except (TypeError, ValueError) as error:
        row.fail(f"a field is not JSON: {error}", EXPECTED)
    try:
        token_ids = tuple(encoder.encode_prompt(messages))
    except DataError as error:
        raise DataError(f"{row.place}: {error}") from error
    return Prompt(
        uid=computed if uid is None else str(uid),
        messages=messages,
        token_ids=token_ids,
        answer=answer,
        source=source,
        metadata=metadata,
    )
