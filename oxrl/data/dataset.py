"""What all datasets share: the rows of a file read once and counted, and drawn in a seeded endless
order.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

from oxrl.data.chat import ChatEncoder, TemplateError
from oxrl.data.order import index_at
from oxrl.data.rows import Row, file_hash, read_rows, row_at
from oxrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
Unit = TypeVar("Unit")


class Lazy(Sequence[Unit]):
    """So many units, each made when it is asked for."""

    def __init__(self, size: int, make: Callable[[int], Unit]) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return self._make(range(self._size)[index])


def _written(path: Path) -> tuple[int, ...]:
    """What tells that a file is no longer the one it was; nothing where there is none."""
    found = path.stat() if path.is_file() else None
    return () if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


class Dataset(ABC, Generic[Unit]):
    """Units in file order, each ready to sample from or to train on.

    `report` counts rows, kept, overlong and empty (both dropped), special_text (rows that hold the
    text of a special token, encoded as text), longest (tokens) and what the dataset adds; and names
    the file's path and sha256.
    """

    noun: ClassVar[str]
    counts: ClassVar[tuple[str, ...]]

    def __init__(self, units: Sequence[Unit], report: Mapping[str, int | str]) -> None:
        self._units = units
        self.report = dict(report)

    def __len__(self) -> int:
        return len(self._units)

    def at(self, draw: int, *, seed: int) -> Unit:
        """The unit at global position `draw` of the shuffled, endless order of `seed`."""
        return self._units[index_at(draw, len(self._units), seed)]

    def in_order(self) -> list[Unit]:
        """Every unit once, in file order."""
        return list(self._units)

    def batches(self, size: int) -> Iterator[list[Unit]]:
        """The same, at most `size` at a time."""
        for start in range(0, len(self), size):
            yield [self._units[index] for index in range(start, min(start + size, len(self)))]

    @classmethod
    @abstractmethod
    def encode(cls, row: Row, encoder: ChatEncoder) -> list[Unit] | str:
        """The units of a row, or the count under which it is dropped."""

    @classmethod
    @abstractmethod
    def measure(cls, units: Sequence[Unit]) -> tuple[int, Mapping[str, int]]:
        """Tokens of the longest of a row's units, and what they add to `counts`."""

    @classmethod
    def check(cls, row: Row, first: Row) -> None:
        """Refuse a row that is unlike the first one of its file."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int | None = None,
        overlong: Literal["drop", "error"] = "drop",
        limit: int | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Self:
        """The first `limit` usable rows of a .jsonl or .parquet file, encoded; `options` are those
        of `encode`.

        Rows of more than `max_tokens` tokens (prompts with the template, all else with the replies)
        are dropped and counted, or an error. With `stream` the rows of a .jsonl file are read again
        whenever drawn. The report is logged, as a warning where rows were dropped.

        Raises:
            DataError: the file cannot be read, a row is malformed, its template unusable, or no row
                is left; names row or counts.
        """
        encoder, first = ChatEncoder(tokenizer), None
        encode = partial(cls.encode, encoder=encoder, **options)
        units, uids = list[Unit](), set[str]()
        # Of each unit on disk, where its row begins and which of the row's units it is.
        places, written = array("q"), _written(Path(path))
        report = dict.fromkeys(
            ("rows", "kept", "empty", "overlong", "special_text", "longest", *cls.counts), 0
        )
        for row in read_rows(path):
            if limit is not None and report["kept"] >= limit:
                break
            report["rows"] += 1
            first, hidden = first or row, encoder.hidden
            cls.check(row, first)
            if row.fields.get("images"):
                row.fail(
                    "it has images, which models here do not see",
                    "text alone: drop the row or the column",
                )
            try:
                made: list[Any] | str = encode(row)
            except TemplateError as error:
                raise DataError(f"{row.place}: {error}") from error
            if isinstance(made, str):
                report[made] += 1
                continue
            tokens, counts = cls.measure(made)
            if max_tokens is not None and tokens > max_tokens:
                if overlong == "error":
                    row.fail(
                        f"the {cls.noun} has {tokens} tokens, more than {max_tokens}",
                        "shorter ones, a larger data.max_prompt_tokens or model.max_length, or data.overlong: drop",
                    )
                report["overlong"] += 1
                continue
            if "duplicate_uids" in report:
                report["duplicate_uids"] += made[0].uid in uids
                uids.add(made[0].uid)
            report |= {name: report[name] + count for name, count in counts.items()}
            report["kept"] += 1
            report["special_text"] += encoder.hidden > hidden
            report["longest"] = max(report["longest"], tokens)
            if stream:
                places.extend(number for part in range(len(made)) for number in (row.start, part))
            else:
                units += made
        if not (units or places):
            dropped = (
                f"{report['empty']} empty, {report['overlong']} longer than {max_tokens} tokens"
            )
            same = f", {report['identical']} identical pairs" if report.get("identical") else ""
            raise DataError(
                f"{path}: no {cls.noun} is left to train on: {report['rows']} rows, {dropped}{same}"
            )
        level = logging.WARNING if report["kept"] < report["rows"] else logging.INFO
        log.log(
            level, "%s: %d of %d rows are used: %s", path, report["kept"], report["rows"], report
        )

        def again(index: int) -> Unit:
            start, part = places[2 * index : 2 * index + 2]
            if _written(Path(path)) != written:
                raise DataError(f"{path} changed while it was being read: the row at byte {start}")
            return encode(row_at(Path(path), start))[part]  # pyright: ignore[reportReturnType]

        held = Lazy(len(places) // 2, again) if stream else units
        return cls(held, {"path": str(path), "sha256": file_hash(path), **report})
