"""Judged completions to learn from: pairs of a better and a worse one, or single verdicts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oxrl.data.batching import to_inputs
from oxrl.data.chat import ChatEncoder
from oxrl.data.conversations import (
    encode_conversation,
    has_blank_reply,
    replies_in,
    split_prompt,
)
from oxrl.data.dataset import Dataset, Dropped, Measured, ReadOptions, Units
from oxrl.data.messages import Messages, read_messages, read_tools
from oxrl.data.rows import OTHERS, Record
from oxrl.errors import InvariantError
from oxrl.seeds import stable_seed
from oxrl.types import Example, Images, PreferenceBatch, TokenIds

EXPECTED = (
    '{"prompt", "chosen", "rejected": each text or messages}, without "prompt" where the other two '
    'are whole conversations; optional numbers "offset" and "margin"; or {"prompt", "completion", '
    f'"label": true or false}}{OTHERS}'
)
# Of an offset or a margin: log-probabilities of whole responses are smaller.
MOST = 1e6


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A pair (`rows` is chosen, rejected) or one completion with its verdict.

    The rows of a pair begin with the same prompt tokens, on which nothing is trained. `offset` and
    `margin` are those of its data row.
    `ref_logprobs` are the reference model's sums per row, None while there is no reference.
    """

    uid: str
    rows: tuple[Example, ...]
    desirable: bool = True
    offset: float = 0.0
    margin: float = 0.0
    ref_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ChangedUnits:
    """Units of a dataset, each changed when it is asked for.

    Args:
        units: as they are in the file.
        change: makes another unit of the number of one and the unit.
    """

    units: Units[Judged]
    change: Callable[[int, Judged], Judged]

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, index: int) -> Judged:
        return self.change(index, self.units[index])


class PreferenceDataset(Dataset[Judged]):
    """Pairs, or with `unpaired` single judged completions, from rows of the form `EXPECTED`.

    A row of one kind is never read as the other, but pairs may be read as two judged completions
    each. `report` counts too: identical (chosen equals rejected; dropped, as is a blank reply),
    chosen_longer (pairs whose chosen completion has more tokens) and desirable.
    """

    noun = "row"
    counts = ("identical", "chosen_longer", "desirable")

    @classmethod
    def encode(cls, record: Record, encoder: ChatEncoder, options: ReadOptions) -> list[Judged]:
        """Encode the pair of a row, or its judged completions one by one."""
        paired = "chosen" in record.fields and "rejected" in record.fields
        if not paired:
            _check_label(record, unpaired=options.unpaired)
        names = ("chosen", "rejected") if paired else ("completion",)
        prompt, replies = _prompt_and_replies(record, names)
        if any(map(has_blank_reply, replies)):
            raise Dropped("empty")
        if paired and replies[0] == replies[1]:
            raise Dropped("identical")
        context = len(prompt)
        tools = read_tools(record)
        rows = [
            encode_conversation(prompt + reply, encoder, context=context, tools=tools)
            for reply in replies
        ]
        uid = str(record.fields.get("uid") or rows[0].uid)
        if options.unpaired:
            verdicts = [True, False] if paired else [record.fields["label"]]
            judged = zip(rows, verdicts, strict=True)
            return [Judged(uid=uid, rows=(row,), desirable=verdict) for row, verdict in judged]
        offset = _number(record, "offset")
        margin = _number(record, "margin")
        return [Judged(uid=uid, rows=tuple(rows), offset=offset, margin=margin)]

    @classmethod
    def measure(cls, units: Sequence[Judged]) -> Measured:
        """Measure the longest completion with its prompt, and if the better is the longer one."""
        lengths = [len(row.token_ids) for unit in units for row in unit.rows]
        desirable = sum(unit.desirable for unit in units)
        return max(lengths), {"chosen_longer": lengths[0] > lengths[-1], "desirable": desirable}

    def chosen(self, indices: Sequence[int]) -> list[Judged]:
        """Return the units at `indices`.

        Args:
            indices: in file order, from 0; one may come twice.

        Returns:
            As many units, in the order of `indices`.
        """
        return [self._units[index] for index in indices]

    def with_reference(self, sums: Tensor, indices: Sequence[int]) -> PreferenceDataset:
        """Add the reference's log-probabilities to the units that are drawn.

        Args:
            sums: [drawn units, rows of a unit], in nats, summed over the trained tokens of a row.
            indices: which units these are; no other one may be asked for.

        Returns:
            Another dataset over the same file.
        """
        place = torch.full((len(self),), -1, dtype=torch.int64)
        place[torch.tensor(indices, dtype=torch.int64)] = torch.arange(len(indices))

        def scored(index: int, unit: Judged) -> Judged:
            row = int(place[index])
            if row < 0:
                raise InvariantError(f"row {index} was not to be drawn: the reference knows it not")
            return replace(unit, ref_logprobs=tuple(sums[row].tolist()))

        return self._changed(scored)

    def with_mismatched(self) -> PreferenceDataset:
        """Add KTO's baseline to the units: the next completion to another prompt, behind theirs."""

        def followed(index: int, unit: Judged) -> Judged:
            prompt = prompt_tokens(unit.rows[0])
            other = self._next_of_another_prompt(index, unit.rows[0]) or unit.rows[0]
            start = len(prompt_tokens(other))
            mismatched = Example(
                uid=f"{unit.uid}/{other.uid}",
                token_ids=prompt + other.token_ids[start:],
                trained=(False,) * len(prompt) + other.trained[start:],
                images=unit.rows[0].images,
            )
            return replace(unit, rows=(*unit.rows, mismatched))

        return self._changed(followed)

    def _next_of_another_prompt(self, index: int, shown: Example) -> Example | None:
        """Find the first row after unit `index`, going round, whose prompt differs, if one does."""
        size = len(self)
        for step in range(1, size):
            row = self._units[(index + step) % size].rows[0]
            if row.images != shown.images or prompt_tokens(row) != prompt_tokens(shown):
                return row
        return None

    def with_equal_lengths(self) -> PreferenceDataset:
        """Train on as many tokens of a pair's longer completion as its shorter one has, for SamPO.

        Which ones is drawn by the row's uid.
        """

        def evened(_: int, unit: Judged) -> Judged:
            shortest = min(sum(row.trained) for row in unit.rows)
            return replace(unit, rows=tuple(_thinned(row, shortest) for row in unit.rows))

        return self._changed(evened)

    def _changed(self, change: Callable[[int, Judged], Judged]) -> PreferenceDataset:
        return PreferenceDataset(ChangedUnits(self._units, change), self.report)


def prompt_tokens(row: Example) -> TokenIds:
    """Return the tokens before the first one that is trained.

    Args:
        row: with at least one trained token.

    Raises:
        ValueError: no token of it is trained.
    """
    return row.token_ids[: row.trained.index(True)]


def to_preference_batch(
    units: Sequence[Judged], pad_id: int, *, rows: int = 2, images: Images = None
) -> PreferenceBatch:
    """Lay judged units out as padded rows, each unit weighing 1/N.

    Args:
        units: N units of the same kind.
        pad_id: the token that fills rows on the right.
        rows: of each unit, how many rows are taken: 1 leaves KTO's mismatched rows out.
        images: those of the rows; None: they have none.

    Returns:
        Rows [R * N, T], those of a unit side by side; extras `offsets` and `margins` [N] are 0.0
        where a data row has none.
    """
    count = len(units)
    taken = [row for unit in units for row in unit.rows[:rows]]
    references = [value for unit in units for value in (unit.ref_logprobs or ())[:rows]]
    desirable = None
    if len(taken) == count:
        desirable = torch.tensor([unit.desirable for unit in units])
    offsets = [unit.offset for unit in units]
    margins = [unit.margin for unit in units]
    return PreferenceBatch(
        inputs=to_inputs(taken, pad_id, images),
        ref_logprobs=torch.tensor(references) if references else None,
        loss_weights=torch.full((count,), 1 / count),
        desirable=desirable,
        extras={"offsets": torch.tensor(offsets), "margins": torch.tensor(margins)},
    )


def _thinned(row: Example, count: int) -> Example:
    """Return the row with `count` of its trained tokens left trained."""
    positions = [position for position, trained in enumerate(row.trained) if trained]
    kept = set(random.Random(stable_seed("sampo", row.uid)).sample(positions, count))
    return replace(row, trained=tuple(position in kept for position in range(len(row.trained))))


def _check_label(record: Record, *, unpaired: bool) -> None:
    """Refuse a record that is no pair, unless it has a verdict that can be learned from."""
    fields = record.fields
    if not unpaired:
        methods = "only the unpaired methods (kto, bco_unpaired) read labels"
        record.fail(f"no 'chosen' and 'rejected'; {methods}", EXPECTED)
    judged = isinstance(fields.get("label"), bool)
    if not judged or "completion" not in fields or "prompt" not in fields:
        record.fail("neither a pair nor a completion with a true or false 'label'", EXPECTED)


def _number(record: Record, name: str) -> float:
    """Return a number of a row; 0.0 where it has none of that name."""
    value = record.fields.get(name)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or isinstance(value, bool):
        record.fail(f"{name} is no number, but {value!r:.80}", EXPECTED)
    if not abs(value) <= MOST:
        record.fail(f"{name} is {value!r:.80}", f"a number of at most {MOST:g} in size")
    return float(value)


def _prompt_and_replies(record: Record, names: Sequence[str]) -> tuple[Messages, list[Messages]]:
    """Return the messages before the replies in the fields `names`, and those of each reply."""
    fields = record.fields
    replies = [read_messages(record, fields[name], what=name, role="assistant") for name in names]
    if "prompt" in fields:
        split = [split_prompt(record, reply, EXPECTED) for reply in replies]
        prompt = split[0][0]
        replies = [answer for _, answer in split]
        if any(asked != prompt for asked, _ in split):
            record.fail("what stands before the prompt is not the same in both replies", EXPECTED)
    else:
        given = _shared_messages(*replies)
        prompt = replies[0][:given]
        replies = [reply[given:] for reply in replies]
    if not prompt or prompt[-1]["role"] == "assistant":
        record.fail("there is no prompt that ends where the assistant answers", EXPECTED)
    if not all(map(replies_in, replies)):
        record.fail("a reply without an assistant message", EXPECTED)
    return prompt, replies


def _shared_messages(chosen: Messages, rejected: Messages) -> int:
    """Count the messages with which two conversations both begin, their last ones left out."""
    most = min(len(chosen), len(rejected)) - 1
    shared = 0
    while shared < most and chosen[shared] == rejected[shared]:
        shared += 1
    return shared
