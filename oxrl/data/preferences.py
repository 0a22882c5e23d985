"""Judged completions to learn from: pairs of a better and a worse one, or single ones with a thumb
up or down.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

import torch
from torch import Tensor

from oxrl.data.batching import to_token_batch
from oxrl.data.chat import ChatEncoder, Message, read_messages
from oxrl.data.conversations import Example, encode_conversation, has_blank_reply
from oxrl.data.dataset import Dataset, Lazy
from oxrl.data.rows import Row
from oxrl.seeds import stable_seed
from oxrl.types import PreferenceBatch

EXPECTED = (
    '{"prompt", "chosen", "rejected": each text or messages}, without "prompt" where the other two are whole '
    'conversations; optional numbers "offset" and "margin"; or {"prompt", "completion", "label": true or false}'
)
COLUMNS = ("offset", "margin")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A pair (`rows` is chosen, rejected) or one completion with its verdict.

    The rows of a pair begin with the same prompt tokens, on which nothing is trained.
    `ref_logprobs` are the reference model's sums per row, None while there is no reference.
    """

    uid: str
    rows: tuple[Example, ...]
    desirable: bool = True
    columns: Mapping[str, float] = field(default_factory=dict[str, float])
    ref_logprobs: tuple[float, ...] | None = None


class PreferenceDataset(Dataset[Judged]):
    """Pairs, or with `unpaired` single judged completions, from rows of the form `EXPECTED`; a row
    of one kind is never read as the other, but pairs may be read as two judged completions each.

    `report` counts too: identical (chosen equals rejected; dropped, as is a blank reply),
    chosen_longer (pairs whose chosen completion has more tokens) and desirable.
    """

    noun = "row"
    counts = ("identical", "chosen_longer", "desirable")

    @classmethod
    def encode(
        cls, row: Row, encoder: ChatEncoder, *, unpaired: bool = False
    ) -> list[Judged] | str:
        context, replies, labels = _parse(row, unpaired)
        if any(map(has_blank_reply, replies)):
            return "empty"
        if len(replies) == 2 and replies[0] == replies[1]:
            return "identical"
        rows = tuple(
            encode_conversation((*context, *r), encoder, context=len(context)) for r in replies
        )
        uid = str(row.fields.get("uid") or rows[0].uid)
        if unpaired:
            return [
                Judged(uid=uid, rows=(e,), desirable=label)
                for e, label in zip(rows, labels, strict=True)
            ]
        columns = {name: row.fields[name] for name in COLUMNS if row.fields.get(name) is not None}
        if not all(isinstance(value, int | float) for value in columns.values()):
            row.fail(f"{' or '.join(columns)} is no number", EXPECTED)
        return [Judged(uid=uid, rows=rows, columns=columns)]

    @classmethod
    def measure(cls, units: Sequence[Judged]) -> tuple[int, Mapping[str, int]]:
        lengths = [len(example.token_ids) for unit in units for example in unit.rows]
        desirable = sum(unit.desirable for unit in units)
        return max(lengths), {"chosen_longer": lengths[0] > lengths[-1], "desirable": desirable}

    def with_reference(self, sums: Tensor) -> PreferenceDataset:
        """The same units with the reference's log-probabilities, [units, rows of a unit]."""
        return self._changed(
            lambda i, unit: dataclasses.replace(unit, ref_logprobs=tuple(sums[i].tolist()))
        )

    def with_mismatched(self) -> PreferenceDataset:
        """Each completion followed by the next one to another prompt, put behind this prompt: KTO's
        baseline.
        """

        def followed(index: int, unit: Judged) -> Judged:
            prompt = _prompt_tokens(unit.rows[0])
            rows = (
                self._units[o].rows[0] for o in chain(range(index + 1, len(self)), range(index))
            )
            other = next((row for row in rows if _prompt_tokens(row) != prompt), unit.rows[0])
            start = len(_prompt_tokens(other))
            mismatched = Example(
                uid=f"{unit.uid}/{other.uid}",
                token_ids=prompt + other.token_ids[start:],
                trained=(False,) * len(prompt) + other.trained[start:],
            )
            return dataclasses.replace(unit, rows=(*unit.rows, mismatched))

        return self._changed(followed)

    def with_equal_lengths(self) -> PreferenceDataset:
        """SamPO: per pair, as many trained tokens of the longer completion as the shorter one has,
        drawn by its uid.
        """

        def evened(index: int, unit: Judged) -> Judged:
            count, rows = min(sum(row.trained) for row in unit.rows), list[Example]()
            for row in unit.rows:
                positions = [position for position, trained in enumerate(row.trained) if trained]
                kept = set(random.Random(stable_seed("sampo", row.uid)).sample(positions, count))
                trained = tuple(position in kept for position in range(len(row.trained)))
                rows.append(dataclasses.replace(row, trained=trained))
            return dataclasses.replace(unit, rows=tuple(rows))

        return self._changed(evened)

    def _changed(self, change: Callable[[int, Judged], Judged]) -> PreferenceDataset:
        return PreferenceDataset(Lazy(len(self), lambda i: change(i, self._units[i])), self.report)


def to_preference_batch(units: Sequence[Judged], pad_id: int, *, rows: int = 2) -> PreferenceBatch:
    """Lay units out as [R * N, T], each weighing 1/N; extras `offsets` and `margins` are 0.0 where
    a data row has none.

    `rows` = 1 leaves KTO's mismatched rows out.
    """
    examples = [example for unit in units for example in unit.rows[:rows]]
    references = [value for unit in units for value in (unit.ref_logprobs or ())[:rows]]
    desirable = (
        torch.tensor([unit.desirable for unit in units])
        if min(rows, len(units[0].rows)) == 1
        else None
    )
    return PreferenceBatch(
        inputs=to_token_batch(
            [e.token_ids for e in examples], [e.trained for e in examples], pad_id
        ),
        ref_logprobs=torch.tensor(references) if references else None,
        loss_weights=torch.full((len(units),), 1 / len(units)),
        desirable=desirable,
        extras={
            f"{name}s": torch.tensor([unit.columns.get(name, 0.0) for unit in units])
            for name in COLUMNS
        },
    )


def _prompt_tokens(example: Example) -> tuple[int, ...]:
    return example.token_ids[: example.trained.index(True)]


def _parse(
    row: Row, unpaired: bool
) -> tuple[tuple[Message, ...], list[tuple[Message, ...]], list[bool]]:
    """(shared prompt, replies, verdicts) of a row; a pair is chosen first."""
    fields = row.fields
    paired = "chosen" in fields and "rejected" in fields
    if not paired and not unpaired:
        row.fail(
            "no 'chosen' and 'rejected'; only the unpaired methods (kto, bco_unpaired) read labels",
            EXPECTED,
        )
    if not paired and not (
        isinstance(fields.get("label"), bool) and "completion" in fields and "prompt" in fields
    ):
        row.fail("neither a pair nor a completion with a true or false 'label'", EXPECTED)
    names = ("chosen", "rejected") if paired else ("completion",)
    replies = [read_messages(row, fields[name], what=name, role="assistant") for name in names]
    if "prompt" in fields:
        prompt = read_messages(row, fields["prompt"], what="prompt")
        # Many published sets repeat the prompt in front of both replies.
        replies = [
            reply[len(prompt) :] if reply[: len(prompt)] == prompt else reply for reply in replies
        ]
    else:
        shared = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*replies, strict=False))
        )
        # Where both are the same to the end, the last message is the reply.
        shared = min(shared, *(len(reply) - 1 for reply in replies))
        prompt, replies = replies[0][:shared], [reply[shared:] for reply in replies]
    if not prompt or prompt[-1]["role"] == "assistant":
        row.fail("there is no prompt that ends where the assistant answers", EXPECTED)
    if not all(any(message["role"] == "assistant" for message in reply) for reply in replies):
        row.fail("a reply without an assistant message", EXPECTED)
    return prompt, replies, [True, False] if paired else [bool(fields["label"])]
