"""schedule.jsonl: every decision of a run whose sampler goes by the clock, a line each.

    {"weights": 4, "worker": 1, "round": 96}    weights of version 4 came to worker 1 at its round
    {"batch": 4, "draws": [32, 40]}             the step after version 4 trains on draws 32 to 39
    {"retry": "37/2", "worker": 0}              worker 0 was lost, and samples this request anew

Like those of metrics.jsonl, every line ends with a running hash, by which a change is seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.errors import OxrlError, RunDirectoryError, shortened
from oxrl.runs.files import (
    CHAIN_FIELD,
    Chain,
    Json,
    Record,
    first_break,
    fsync,
    json_object,
    open_own,
    write_records,
)

SCHEDULE = "schedule.jsonl"
WEIGHTS = "weights"
BATCH = "batch"
RETRY = "retry"
# The fields of a line, by the first of them.
KINDS = {
    WEIGHTS: (WEIGHTS, "worker", "round"),
    BATCH: (BATCH, "draws"),
    RETRY: (RETRY, "worker"),
}
RESTORE = "Restore it from a copy"


class Mark(NamedTuple):
    """A place in the file: its bytes up to there, and their running hash."""

    bytes: int
    chain: int


class ScheduleFile:
    """The file of a run, which is begun anew unless it is gone on with.

    Args:
        path: of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun = False
        self._chain = Chain()
        self._end = 0

    def add(self, lines: Sequence[Record]) -> None:
        """Append lines; they are with the operating system then.

        Raises:
            OxrlError: the disk refused.
        """
        try:
            with open_own(self._path, "ab" if self._begun else "wb") as file:
                self._begun = True
                write_records(file, lines, self._chain)
                self._end = file.tell()
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def mark(self) -> Mark:
        """Force everything to the disk; say where a checkpoint taken now continues.

        Raises:
            OxrlError: the disk refused.
        """
        self.add([])
        try:
            fsync(self._path)
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        return self.here

    @property
    def here(self) -> Mark:
        """The place of the next line."""
        return Mark(self._end, self._chain.value())

    def cut(self, mark: Mark) -> None:
        """Forget every line behind a place.

        Args:
            mark: the place, also of another process that wrote this file.

        Raises:
            RunDirectoryError: what stands before it is not what was written there.
            OxrlError: the disk refused.
        """
        chain = Chain()
        try:
            with open_own(self._path, "a+b") as file:
                file.seek(0)
                before = file.read(mark.bytes)
                chain.add(before)
                if Mark(len(before), chain.value()) != mark:
                    raise RunDirectoryError(_not_as_written(self._path, before, mark))
                file.truncate(mark.bytes)
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        self._chain = chain
        self._end = mark.bytes
        self._begun = True


def _not_as_written(path: Path, before: bytes, mark: Mark) -> str:
    if len(before) < mark.bytes:
        return (
            f"{path} has {len(before)} bytes and had {mark.bytes} when the checkpoint was taken: "
            f"lines are missing. {RESTORE}, or start a new run in another directory (run.dir=...)"
        )
    number = first_break(before.splitlines(keepends=True))
    where = "its lines were written again" if number is None else f"line {number}"
    return (
        f"{path}, {where}: it is not what was written there before the checkpoint was taken. "
        f"{RESTORE}, or start a new run in another directory (run.dir=...)"
    )


def _cannot_write(path: Path, error: OSError) -> OxrlError:
    return OxrlError(
        f"{path} cannot be written: {error}. Without its schedule a run that goes by the clock "
        "cannot be replayed; free space on that disk and start again with --resume"
    )


class Line(NamedTuple):
    """A line that was read: its number, its kind, and what it says without its hash."""

    number: int
    kind: str
    says: Json


class Schedule(NamedTuple):
    """All lines of a file; `changed` is the first that is not what was written there, if any."""

    path: Path
    lines: list[Line]
    changed: int | None


def read_schedule(path: Path) -> Schedule:
    """Read the file of a run.

    Raises:
        RunDirectoryError: it is not there, its last line was cut, or a line is no decision; names
            the line and what stands there.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise RunDirectoryError(
            f"{path} is not there: runs with rollout.schedule=free write it, and all others are "
            "replayed by their steps (oxrl replay RUN --step N)"
        ) from error
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    raw = content.splitlines(keepends=True)
    lines = [_line_of(path, number, line) for number, line in enumerate(raw, start=1)]
    return Schedule(path, lines, first_break(raw))


def _line_of(path: Path, number: int, raw: bytes) -> Line:
    where = f"{path}, line {number}"
    if not raw.endswith(b"\n"):
        raise RunDirectoryError(
            f"{where}: it ends in the middle of a line, {shortened(repr(raw))}: what came behind "
            f"is lost. {RESTORE}"
        )
    found = json_object(raw)
    if found is None:
        raise RunDirectoryError(f"{where}: no JSON object, but {raw[:60]!r}. {RESTORE}")
    found.pop(CHAIN_FIELD, None)
    kind = next(iter(found), "")
    known = KINDS.get(kind, ())
    wrong = [name for name in known if not _fits(name, found.get(name))]
    if wrong or not known or tuple(found) != known:
        what = f"{wrong[0]} = {found.get(wrong[0])!r}" if wrong else shortened(json.dumps(found))
        forms = ", ".join("/".join(fields) for fields in KINDS.values())
        raise RunDirectoryError(f"{where}: {what} is no decision of a run ({forms}). {RESTORE}")
    return Line(number, kind, found)


def _fits(name: str, value: Any) -> bool:
    """Return whether a field has a value that a run writes there."""
    if name == RETRY:
        return isinstance(value, str)
    if name == "draws":
        return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))  # pyright: ignore
    return _is_count(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class RecordedBatch(NamedTuple):
    """The record of samples of a batch: the version that trained on it, and its draws [start, end).

    `end` None: it is not known.
    """

    step: int
    start: int
    end: int | None


class WrongLine(NamedTuple):
    """A line of a schedule that says something else than the record of the run."""

    where: str
    says: str
    record: str
    equal: bool = False

    def __str__(self) -> str:
        return f"different  {self.where}: it says {self.says}, the record says {self.record}"


def wrong_lines(schedule: Schedule, batches: Iterable[RecordedBatch]) -> Iterator[WrongLine]:
    """Compare a schedule with the record of the samples that were trained on.

    Lines of the step after the last recorded one are let pass: a run may end in the middle of it.

    Args:
        schedule: as it was read.
        batches: every one that is recorded, in order.
    """
    workers = _leading_weights(schedule.lines)
    expected = list(_expected(batches, workers))
    decisions = [line for line in schedule.lines if line.kind != RETRY]
    found = list(_unlike(schedule, decisions, expected))
    rest = decisions[len(expected) : len(expected) + workers + 1]
    further = decisions[len(expected) + len(rest) :]
    if further:
        found.append(_wrong(schedule, further[0], "no batch that begins there"))
    if len(decisions) < len(expected):
        where = f"{schedule.path}, after line {len(schedule.lines)}"
        found.append(WrongLine(where, "nothing more", json.dumps(expected[len(decisions)])))
    named = {wrong.where for wrong in found}
    if schedule.changed is not None:
        line = schedule.lines[schedule.changed - 1]
        hashed = "by its running hash that another line was written there, or others before it"
        wrong = _wrong(schedule, line, hashed)
        if wrong.where not in named:
            found.insert(0, wrong)
    yield from found


def _leading_weights(lines: Sequence[Line]) -> int:
    """Count the workers: the weights of each are noted before the first batch."""
    count = 0
    for line in lines:
        if line.kind == BATCH:
            break
        count += line.kind == WEIGHTS
    return max(count, 1)


def _expected(batches: Iterable[RecordedBatch], workers: int) -> Iterator[Json]:
    """Yield what the lines say, in order, without the rounds that only they know."""
    for batch in batches:
        for worker in range(workers):
            yield {WEIGHTS: batch.step, "worker": worker}
        known = {} if batch.end is None else {"draws": [batch.start, batch.end]}
        yield {BATCH: batch.step, **known}


def _unlike(
    schedule: Schedule, decisions: Sequence[Line], expected: Sequence[Json]
) -> Iterator[WrongLine]:
    """Yield the lines that say something else; after one of another kind none is looked at."""
    for line, record in zip(decisions, expected, strict=False):
        if any(line.says.get(name) != value for name, value in record.items()):
            yield _wrong(schedule, line, json.dumps(record))
        if line.kind not in record:
            return


def _wrong(schedule: Schedule, line: Line, record: str) -> WrongLine:
    return WrongLine(f"{schedule.path}, line {line.number}", json.dumps(line.says), record)
