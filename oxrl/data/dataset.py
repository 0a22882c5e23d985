"""The base of all datasets: a file read once and counted, and drawn in a seeded endless order."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from oxrl.data.chat import ChatEncoder, Overlong, TemplateError
from oxrl.data.order import Shuffled, Units
from oxrl.data.rows import Record, in_our_words, read_rows, row_at
from oxrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oxrl.data.actions import ActionHead
    from oxrl.data.image_store import ImageStore

log = logging.getLogger(__name__)
# Of every file: its rows, those kept, and those dropped because nothing, or too much, is in them;
# rows that hold the text of a special token, encoded as text; tokens of the longest row kept.
COUNTS = ("rows", "kept", "empty", "overlong", "special_text", "longest")
SHORTER = (
    "shorter ones, a larger data.max_prompt_tokens or model.max_length, or data.overlong: drop"
)
SPECIAL_TEXT = (
    "%s: %d of %d rows hold the text of special tokens, which is read as text. Where a chat "
    "template laid out a prompt already, it is laid out twice: give messages instead"
)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options of reading the rows of a data file.

    Args:
        max_tokens: the longest row; prompts are measured with the template, all else with the
            replies. None: any length.
        overlong: drop and count longer rows, or refuse them.
        limit: how many usable rows are read, from the first on. None: all.
        stream: hold only where the rows of a .jsonl file begin; read a row whenever it is drawn.
        unpaired: read preferences as single judged completions, a pair as two of them.
        columns: our name of a field -> the one that it has in the file.
        images: reads those of the rows. None: rows with images are refused.
        no_images: why they are.
        actions: replies are actions, as these tokens. None: they are text.
    """

    max_tokens: int | None = None
    overlong: Literal["drop", "error"] = "drop"
    limit: int | None = None
    stream: bool = False
    unpaired: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    images: ImageStore | None = None
    no_images: str = "this model cannot read"
    actions: ActionHead | None = None

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
        """Make the encoder that turns messages into tokens.

        Args:
            tokenizer: with a chat template.

        Returns:
            One that encodes the places of images too, where rows may have them.

        Raises:
            DataError: the tokenizer has no chat template, or one that does not end.
        """
        made = ChatEncoder(tokenizer) if self.images is None else self.images.encoder(tokenizer)
        made.most = self.max_tokens
        return made


EVERYTHING = ReadOptions()


class Identified(Protocol):
    """A unit of a dataset, which has a name."""

    @property
    def uid(self) -> str:
        """The name of the unit in records, the same in every run."""
        ...


Unit = TypeVar("Unit", bound=Identified)
# Tokens of the longest unit of a record, and numbers that the record adds to the report.
Measured = tuple[int, Mapping[str, int]]


class Dropped(Exception):
    """A row that nothing can be learned from; says which count of the report it goes under."""


class StreamedUnits(Generic[Unit]):
    """Units of a .jsonl file of which only the places are held.

    Args:
        path: of the file.
        encode: makes the units of a record, the same each time.

    Raises:
        DataError: the file is no longer the one it was, when a unit is asked for.
    """

    def __init__(self, path: Path, encode: Callable[[Record], list[Unit]]) -> None:
        self._path = path
        self._encode = encode
        self._written = _written(path)
        self._starts = array("q")  # of each unit, the byte where its row begins
        self._parts = array("q")  # and which of the row's units it is

    def add(self, record: Record, count: int) -> None:
        """Note the place of a record that makes `count` units.

        Args:
            record: of the file, in its order; only its place is kept.
            count: how many, as `encode` will make again.
        """
        for part in range(count):
            self._starts.append(record.start)
            self._parts.append(part)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Unit:
        start = self._starts[index]
        if _written(self._path) != self._written:
            told = f"{self._path} changed while it was being read: the row at byte {start}"
            raise DataError(told)
        made = self._encode(row_at(self._path, start))
        return made[self._parts[index]]


def _written(path: Path) -> tuple[int, ...]:
    """Return the numbers that change when a file is written anew; empty where there is no file."""
    if not path.is_file():
        return ()
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


class Dataset(Shuffled[Unit], ABC):
    """Units in file order, each ready to sample from or to train on.

    `report` has the COUNTS of the file, and those that the dataset adds.

    Args:
        units: in file order.
        report: what became of the rows of the file.
    """

    noun: ClassVar[str]
    counts: ClassVar[tuple[str, ...]]

    def __init__(self, units: Units[Unit], report: Mapping[str, int]) -> None:
        super().__init__(units)
        self.report = dict(report)

    @classmethod
    @abstractmethod
    def encode(cls, record: Record, encoder: ChatEncoder, options: ReadOptions) -> list[Unit]:
        """Make the units of one record, at least one.

        Args:
            record: one row of the file, under the names that datasets read.
            encoder: makes tokens of messages.
            options: how rows are read.

        Returns:
            Units in an order that is always the same.

        Raises:
            Dropped: nothing can be learned from it.
            DataError: it is malformed, or the chat template cannot be used for it.
        """

    @classmethod
    @abstractmethod
    def measure(cls, units: Sequence[Unit]) -> Measured:
        """Measure a record's longest unit in tokens, and what the record adds to the report.

        Args:
            units: of one record, at least one.

        Returns:
            Tokens; and a number for some of `counts`, which is added to what it was.
        """

    @classmethod
    def check(cls, record: Record, first: Record) -> None:
        """Refuse a record that is unlike the first one of its file; here all are fine.

        Args:
            record: one row.
            first: the first row of the same file.

        Raises:
            DataError: it is another kind of row; names it.
        """

    @classmethod
    def load(
        cls,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        options: ReadOptions = EVERYTHING,
    ) -> Self:
        """Read and encode a data file; log its report, as a warning where rows were dropped.

        Args:
            path: a .jsonl or .parquet file.
            tokenizer: encodes the rows through its chat template.
            options: how rows are read, and which of them.

        Returns:
            The usable rows, in file order.

        Raises:
            DataError: the file cannot be read, a row is malformed, its template unusable, or no row
                is left; names row or counts.
        """
        encoder = options.encoder(tokenizer)

        def encode(record: Record) -> list[Unit]:
            return cls._encoded(in_our_words(record, options.columns), encoder, options)

        report = cls._counts()
        in_memory: list[Unit] = []
        streamed = StreamedUnits(Path(path), encode)
        for record, made in cls._usable(read_rows(path), encoder, options, report):
            if options.stream:
                streamed.add(record, len(made))
            else:
                in_memory += made
        rows = report["rows"]
        if report["kept"] == 0:
            raise cls._nothing_left(path, options, report)
        level = logging.WARNING if report["kept"] < rows else logging.INFO
        log.log(level, "%s: %d of %d rows are used: %s", path, report["kept"], rows, report)
        if report["special_text"]:
            log.warning(SPECIAL_TEXT, path, report["special_text"], rows)
        return cls(streamed if options.stream else in_memory, report)

    @classmethod
    def first(
        cls,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        options: ReadOptions,
        count: int,
        others: Iterable[Record] = (),
    ) -> tuple[list[list[Unit]], int]:
        """Read the units of the first usable rows, as `load` makes them, and no more of the file.

        Args:
            path: a .jsonl or .parquet file.
            tokenizer: encodes the rows through its chat template.
            options: how rows are read; a smaller `limit` goes before `count`.
            count: of rows, at most; at least 1.
            others: rows of the file that are measured as well.

        Returns:
            The units of each row, at least of one; and tokens of the longest unit of all these
            rows, `max_tokens` where one is overlong.

        Raises:
            DataError: as `load` does.
        """
        encoder = options.encoder(tokenizer)
        report = cls._counts()
        limit = count if options.limit is None else min(count, options.limit)
        few = replace(options, limit=limit)
        found = [made for _, made in cls._usable(read_rows(path), encoder, few, report)]
        if not found:
            raise cls._nothing_left(path, options, report)
        for _ in cls._usable(others, encoder, replace(options, limit=None), report):
            pass
        if report["overlong"]:
            report["longest"] = options.max_tokens or 0
        return found, report["longest"]

    @classmethod
    def _counts(cls) -> dict[str, int]:
        """Make a report of no rows."""
        return dict.fromkeys((*COUNTS, *cls.counts), 0)

    @classmethod
    def _nothing_left(
        cls, path: str | Path, options: ReadOptions, report: Mapping[str, int]
    ) -> DataError:
        """Make the error of a file without a usable row."""
        overlong = f"{report['overlong']} longer than {options.max_tokens} tokens"
        why = f"{report['empty']} empty, {overlong}"
        if report.get("identical"):
            why += f", {report['identical']} identical pairs"
        rows = report["rows"]
        return DataError(f"{path}: no {cls.noun} is left to train on: {rows} rows, {why}")

    @classmethod
    def _usable(
        cls,
        rows: Iterable[Record],
        encoder: ChatEncoder,
        options: ReadOptions,
        report: dict[str, int],
    ) -> Iterator[tuple[Record, list[Unit]]]:
        """Yield what can be used, record by record with its units, and count into `report`."""
        first = None
        seen: set[str] = set()
        longest = options.max_tokens
        for row in rows:
            if report["kept"] == options.limit:
                return
            report["rows"] += 1
            record = in_our_words(row, options.columns)
            first = first or record
            hidden = encoder.hidden
            cls.check(record, first)
            try:
                made = cls._encoded(record, encoder, options)
                tokens, counts = cls.measure(made)
                if longest is not None and tokens > longest:
                    if options.overlong == "error":
                        record.fail(
                            f"the {cls.noun} has {tokens} tokens, more than {longest}", SHORTER
                        )
                    raise Dropped("overlong")
            except Dropped as dropped:
                report[str(dropped)] += 1
                continue
            for name, count in counts.items():
                report[name] += count
            if "duplicate_uids" in report:
                report["duplicate_uids"] += made[0].uid in seen
                seen.add(made[0].uid)
            report["kept"] += 1
            report["special_text"] += encoder.hidden > hidden
            report["longest"] = max(report["longest"], tokens)
            yield record, made

    @classmethod
    def _encoded(cls, record: Record, encoder: ChatEncoder, options: ReadOptions) -> list[Unit]:
        if options.images is not None:
            record = options.images.prepared(record)
        elif record.fields.get("images") or record.fields.get("image"):
            problem = f"it has images, which {options.no_images}"
            record.fail(problem, "text alone: drop the row or the column")
        try:
            return cls.encode(record, encoder, options)
        except Overlong as error:
            if options.overlong == "error":
                record.fail(f"the {cls.noun} is too long: {error}", SHORTER)
            raise Dropped("overlong") from error
        except TemplateError as error:
            raise DataError(f"{record.place}: {error}") from error
