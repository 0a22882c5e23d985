"""Judged completions to learn from: pairs of a better and a worse one, or single ones with a thumb up or down."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from oxrl.data.batching import to_token_batch
from oxrl.data.chat import ChatEncoder, Message, read_messages
from oxrl.data.conversations import Example, encode_conversation
from oxrl.data.order import index_at
from oxrl.data.rows import Row, file_hash, read_rows
from oxrl.errors import DataError
from oxrl.seeds import stable_seed
from oxrl.types import PreferenceBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPECTED = (
    '{"prompt", "chosen", "rejected": each text or messages}, without "prompt" where the other two are whole '
    'conversations; optional numbers "offset" and "margin"; or {"prompt", "completion", "label": true or false}'
)
COLUMNS = ("offset", "margin")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A pair (`rows` is chosen, rejected) or one completion with its verdict.

    The rows of a pair begin with the same prompt tokens, on which nothing is trained. `ref_logprobs` are the reference
    model's sums per row, None while there is no reference.
    """

    uid: str
    rows: tuple[Example, ...]
    desirable: bool = True
    columns: Mapping[str, float] = field(default_factory=dict[str, float])
    ref_logprobs: tuple[float, ...] | None = None


class PreferenceDataset:
    """Pairs, or with `unpaired` single judged completions; a row of one kind is never read as the other, but pairs may
    be read as two judged completions each.

    `report` counts: rows, kept, identical (chosen equals rejected), empty (a blank reply) and overlong, all three
    dropped; special_text, longest (tokens), chosen_longer (pairs whose chosen completion has more tokens), desirable,
    and the file's path and sha256.
    """

    def __init__(self, units: Sequence[Judged], report: Mapping[str, int | str]) -> None:
        self._units = list(units)
        self.report = dict(report)

    @classmethod
    def load(
        cls,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        unpaired: bool = False,
        max_tokens: int | None = None,
        overlong: Literal["drop", "error"] = "drop",
        limit: int | None = None,
    ) -> PreferenceDataset:
        """Read, check, render and encode every row of `path`.

        Args:
            path: .jsonl or .parquet; one row is `EXPECTED`.
            tokenizer: with a chat template.
            unpaired: give single completions; a pair gives two.
            max_tokens: longest prompt with completion allowed, in tokens; None is no limit.
            overlong: drop a row that is longer, or fail.
            limit: stop after this many kept rows of the file.

        Raises:
            DataError: the file cannot be read, a row is malformed, or nothing is left; names row or counts.
        """
        encoder = ChatEncoder(tokenizer)
        units: list[Judged] = []
        names = "rows kept identical empty overlong special_text longest chosen_longer desirable".split()
        counts = dict.fromkeys(names, 0)
        for row in read_rows(path):
            if limit is not None and counts["kept"] >= limit:
                break
            counts["rows"] += 1
            context, replies, labels = _parse(row, unpaired)
            problem = _blank_or_identical(replies)
            if problem:
                counts[problem] += 1
                continue
            try:
                rows = tuple(encode_conversation((*context, *r), encoder, context=len(context)) for r in replies)
            except DataError as error:
                raise DataError(f"{row.place}: {error}") from error
            lengths = [len(example.token_ids) for example in rows]
            if max_tokens is not None and max(lengths) > max_tokens:
                if overlong == "error":
                    row.fail(f"it has {max(lengths)} tokens, more than {max_tokens}", "shorter rows, or overlong: drop")
                counts["overlong"] += 1
                continue
            counts["kept"] += 1
            counts["special_text"] += any(encoder.has_special_text((*context, *reply)) for reply in replies)
            counts["longest"] = max(counts["longest"], *lengths)
            counts["chosen_longer"] += len(rows) == 2 and lengths[0] > lengths[1]
            counts["desirable"] += sum(labels)
            columns = {name: float(row.fields[name]) for name in COLUMNS if row.fields.get(name) is not None}
            uid = str(row.fields.get("uid") or rows[0].uid)
            if unpaired:
                units += [Judged(uid=uid, rows=(e,), desirable=label) for e, label in zip(rows, labels, strict=True)]
            else:
                units.append(Judged(uid=uid, rows=rows, columns=columns))
        if not units:
            raise DataError(f"{path}: no row is left to train on: {counts}; one row is {EXPECTED}")
        return cls(units, {"path": str(path), "sha256": file_hash(path), **counts})

    def __len__(self) -> int:
        return len(self._units)

    def at(self, draw: int, *, seed: int) -> Judged:
        """The unit at global position `draw` of the shuffled, endless order of `seed`."""
        return self._units[index_at(draw, len(self._units), seed)]

    def in_order(self) -> list[Judged]:
        return list(self._units)

    def with_reference(self, sums: Sequence[Sequence[float]]) -> PreferenceDataset:
        """The same units with the reference's log-probabilities, one sequence per unit."""
        known = [
            dataclasses.replace(unit, ref_logprobs=tuple(values))
            for unit, values in zip(self._units, sums, strict=True)
        ]
        return PreferenceDataset(known, self.report)

    def with_mismatched(self) -> PreferenceDataset:
        """Each completion followed by the next one to another prompt, put behind this prompt: KTO's baseline."""
        prompts = [_prompt_tokens(unit.rows[0]) for unit in self._units]
        units: list[Judged] = []
        for index, unit in enumerate(self._units):
            others = (*range(index + 1, len(prompts)), *range(index))
            other = self._units[next((o for o in others if prompts[o] != prompts[index]), index)].rows[0]
            start = len(_prompt_tokens(other))
            mismatched = Example(
                uid=f"{unit.uid}/{other.uid}",
                token_ids=prompts[index] + other.token_ids[start:],
                trained=(False,) * len(prompts[index]) + other.trained[start:],
            )
            units.append(dataclasses.replace(unit, rows=(*unit.rows, mismatched)))
        return PreferenceDataset(units, self.report)

    def with_equal_lengths(self) -> PreferenceDataset:
        """SamPO: per pair, as many trained tokens of the longer completion as the shorter one has, drawn by its uid."""

        def thinned(example: Example, count: int) -> Example:
            positions = [position for position, trained in enumerate(example.trained) if trained]
            kept = set(random.Random(stable_seed("sampo", example.uid)).sample(positions, count))
            trained = tuple(position in kept for position in range(len(example.trained)))
            return dataclasses.replace(example, trained=trained)

        counts = [min(sum(row.trained) for row in unit.rows) for unit in self._units]
        pairs = zip(self._units, counts, strict=True)
        units = [dataclasses.replace(u, rows=tuple(thinned(row, count) for row in u.rows)) for u, count in pairs]
        return PreferenceDataset(units, self.report)


def to_preference_batch(units: Sequence[Judged], pad_id: int, *, rows: int = 2) -> PreferenceBatch:
    """Lay units out as [R * N, T], each weighing 1/N; extras `offsets` and `margins` are 0.0 where a data row has none.

    `rows` = 1 leaves KTO's mismatched rows out.
    """
    examples = [example for unit in units for example in unit.rows[:rows]]
    references = [value for unit in units for value in (unit.ref_logprobs or ())[:rows]]
    desirable = torch.tensor([unit.desirable for unit in units]) if min(rows, len(units[0].rows)) == 1 else None
    return PreferenceBatch(
        inputs=to_token_batch([e.token_ids for e in examples], [e.trained for e in examples], pad_id),
        ref_logprobs=torch.tensor(references) if references else None,
        loss_weights=torch.full((len(units),), 1 / len(units)),
        desirable=desirable,
        extras={f"{name}s": torch.tensor([unit.columns.get(name, 0.0) for unit in units]) for name in COLUMNS},
    )


def _prompt_tokens(example: Example) -> tuple[int, ...]:
    return example.token_ids[: example.trained.index(True)]


def _blank_or_identical(replies: Sequence[tuple[Message, ...]]) -> Literal["", "empty", "identical"]:
    if any(m["role"] == "assistant" and not m["content"].strip() for reply in replies for m in reply):
        return "empty"
    return "identical" if len(replies) == 2 and replies[0] == replies[1] else ""


def _parse(row: Row, unpaired: bool) -> tuple[tuple[Message, ...], list[tuple[Message, ...]], list[bool]]:
    """(shared prompt, replies, verdicts) of a row; a pair is chosen first."""
    fields = row.fields
    paired = "chosen" in fields and "rejected" in fields
    if not paired and not unpaired:
        row.fail("no 'chosen' and 'rejected'; only the unpaired methods (kto, bco_unpaired) read labels", EXPECTED)
    if not paired and not (isinstance(fields.get("label"), bool) and "completion" in fields and "prompt" in fields):
        row.fail("neither a pair nor a completion with a true or false 'label'", EXPECTED)
    names = ("chosen", "rejected") if paired else ("completion",)
    replies = [_reply(row, name, fields[name]) for name in names]
    if "prompt" in fields:
        prompt = read_messages(row, fields["prompt"], what="prompt")
        # Many published sets repeat the prompt in front of both replies.
        replies = [reply[len(prompt) :] if reply[: len(prompt)] == prompt else reply for reply in replies]
    else:
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*replies, strict=False)))
        # Where both are the same to the end, the last message is the reply.
        shared = min(shared, *(len(reply) - 1 for reply in replies))
        prompt, replies = replies[0][:shared], [reply[shared:] for reply in replies]
    if not prompt or prompt[-1]["role"] == "assistant":
        row.fail("there is no prompt that ends where the assistant answers", EXPECTED)
    if not all(any(message["role"] == "assistant" for message in reply) for reply in replies):
        row.fail("a reply without an assistant message", EXPECTED)
    return prompt, replies, [True, False] if paired else [bool(fields["label"])]


def _reply(row: Row, name: str, value: Any) -> tuple[Message, ...]:
    messages = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
    return read_messages(row, messages, what=name)
