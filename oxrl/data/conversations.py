"""Conversations to learn from: which tokens the assistant wrote, its stop token included, and which were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oxrl.data.chat import EXPECTED_MESSAGES, ChatEncoder, Message, read_messages
from oxrl.data.order import index_at
from oxrl.data.prompts import content_uid
from oxrl.data.rows import Row, file_hash, read_rows
from oxrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPECTED = f'{{"messages": {EXPECTED_MESSAGES}}} or {{"prompt": text or messages, "completion": text}}'


@dataclass(frozen=True, kw_only=True)
class Example:
    """One conversation. `trained[t]` says that the assistant wrote `token_ids[t]`: it is a target of the loss.

    "<|user|>1+1<|end|><|assistant|>2<|end|>" has the mask 0 0 0 0 0 0 1 1: the reply and the token that stops it.
    """

    uid: str
    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]


class ConversationDataset:
    """Conversations with token ids and loss masks.

    `report` counts: rows, kept, overlong, empty (a blank reply; dropped), special_text, longest, trained_tokens, and
    the file's path and sha256.
    """

    def __init__(self, examples: Sequence[Example], report: Mapping[str, int | str]) -> None:
        self._examples = list(examples)
        self.report = dict(report)

    @classmethod
    def load(
        cls,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int | None = None,
        overlong: Literal["drop", "error"] = "drop",
        limit: int | None = None,
    ) -> ConversationDataset:
        """Read, check, render and encode every row of `path`; several assistant turns in a row are all learned.

        Args:
            path: .jsonl or .parquet; one row is `EXPECTED`.
            tokenizer: with a chat template that keeps earlier text unchanged when a turn is added.
            max_tokens: longest conversation allowed, in tokens after templating; None is no limit.
            overlong: what to do with longer ones: drop and count them, or fail.
            limit: stop after this many kept conversations.

        Raises:
            DataError: the file cannot be read, a row is malformed, the template rewrites earlier turns or does not stop
                a reply with a special token, or nothing is left; names row or counts.
        """
        encoder = ChatEncoder(tokenizer)
        examples: list[Example] = []
        counts = dict.fromkeys(("rows", "kept", "overlong", "empty", "special_text", "longest", "trained_tokens"), 0)
        for row in read_rows(path):
            if limit is not None and len(examples) >= limit:
                break
            counts["rows"] += 1
            messages = _messages(row)
            if any(m["role"] == "assistant" and not m["content"].strip() for m in messages):
                counts["empty"] += 1
                continue
            try:
                example = encode_conversation(messages, encoder)
            except DataError as error:
                raise DataError(f"{row.place}: {error}") from error
            length = len(example.token_ids)
            if max_tokens is not None and length > max_tokens:
                if overlong == "error":
                    row.fail(
                        f"the conversation has {length} tokens, more than {max_tokens}",
                        "shorter conversations, a larger model.max_length, or data.overlong: drop",
                    )
                counts["overlong"] += 1
                continue
            counts["special_text"] += encoder.has_special_text(messages)
            counts["longest"] = max(counts["longest"], length)
            counts["trained_tokens"] += sum(example.trained)
            examples.append(example)
        counts["kept"] = len(examples)
        if not examples:
            raise DataError(
                f"{path}: no conversation is left to train on: {counts['rows']} rows, {counts['empty']} empty, "
                f"{counts['overlong']} longer than {max_tokens} tokens"
            )
        return cls(examples, {"path": str(path), "sha256": file_hash(path), **counts})

    def __len__(self) -> int:
        return len(self._examples)

    def at(self, draw: int, *, seed: int) -> Example:
        """The example at global position `draw` of the shuffled, endless order of `seed`."""
        return self._examples[index_at(draw, len(self._examples), seed)]

    def in_order(self) -> list[Example]:
        """Every example once, in file order."""
        return list(self._examples)


def encode_conversation(messages: Sequence[Message], encoder: ChatEncoder, *, context: int = 0) -> Example:
    """Token ids and loss mask of a conversation up to its last assistant turn; the first `context` messages are given.

    Each reply is encoded apart from what stands before it, as sampling produces it: prompt tokens, then reply tokens.

    Raises:
        DataError: the template rewrites earlier turns, or ends a reply without a special token.
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
        _require_prefix(done, before, "the conversation before a reply", "the same conversation one turn later")
        _require_prefix(before, after, "the prompt for a reply", "the same conversation with the reply")
        given = encoder.encode(before[len(done) :], hidden)
        reply = encoder.encode(after[len(before) :], hidden)
        stops = [position for position, token in enumerate(reply) if token in encoder.special_ids]
        if not stops:
            raise DataError(
                "the chat template does not stop a reply with a special token, so the model would never learn to stop; "
                f"it renders the reply as {after[len(before) :][-120:]!r}; set model.chat_template to one that does"
            )
        ids += given + reply
        # What the template adds after the stop token (a line feed in ChatML) is never sampled, so it is not learned.
        trained += [False] * len(given) + [turn >= context and position <= stops[-1] for position in range(len(reply))]
        done = after
    return Example(uid=content_uid([dict(m) for m in messages]), token_ids=tuple(ids), trained=tuple(trained))


def _require_prefix(prefix: str, text: str, prefix_name: str, text_name: str) -> None:
    if text.startswith(prefix):
        return
    at = next((i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), min(len(prefix), len(text)))
    start = max(0, at - 40)
    raise DataError(
        f"the chat template changes earlier text when a turn is added (first difference at character {at}), so replies "
        f"cannot be told from what was given; set model.chat_template to one that keeps it\n"
        f"  {prefix_name}: ...{prefix[start : at + 60]!r}\n  {text_name}: ...{text[start : at + 60]!r}"
    )


def _messages(row: Row) -> tuple[Message, ...]:
    fields = row.fields
    if "messages" in fields:
        messages = read_messages(row, fields["messages"], what="messages")
    elif "prompt" in fields and isinstance(fields.get("completion"), str):
        completion = [{"role": "assistant", "content": fields["completion"]}]
        messages = read_messages(row, fields["prompt"], what="prompt")
        messages += read_messages(row, completion, what="completion")
    else:
        row.fail("neither 'messages' nor 'prompt' with a text 'completion'", EXPECTED)
    if not any(message["role"] == "assistant" for message in messages):
        row.fail("no assistant message: nothing to learn", EXPECTED)
    return messages
