"""The samples of a run for its report: short columns to filter by, and texts in pieces.

A page reads a piece only when something of it is to be seen, so that 100,000 samples open as fast
as ten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from oxrl.errors import RunDirectoryError
from oxrl.report.images import images_in
from oxrl.runs.directory import ROLLOUTS
from oxrl.runs.files import Json, read_records

# Samples whose texts are unpacked at a time.
PIECE = 250
# Samples whose tokens are in a report, the newest: each takes about a kilobyte.
MOST_WITH_TOKENS = 2_000
WORDS = ("status", "end", "source")
NUMBERS = ("step", "draw", "sample", "reward", "advantage", "length", "prompt")
DIGITS = 4


class Samples:
    """Samples as they are read: `pieces` yields the texts, and fills the columns meanwhile."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.columns: dict[str, list[Any]] = {name: [] for name in (*NUMBERS, *WORDS)}
        # Names of the images that samples show, in the order of their last showing.
        self.images: dict[str, None] = {}
        self._prompts: dict[str, int] = {}

    @property
    def count(self) -> int:
        """Samples read so far."""
        return len(self.columns["step"])

    @property
    def words(self) -> dict[str, list[str]]:
        """The choices in every column of words: the words that occur there."""
        return {name: list(dict.fromkeys(self.columns[name])) for name in WORDS}

    def pieces(self) -> Iterator[list[Json]]:
        """Every sample, PIECE at a time, in the order of the file.

        Raises:
            RunDirectoryError: a line is no sample; says which and why.
        """
        piece: list[Json] = []
        for line in read_records(self._directory / "samples.jsonl"):
            try:
                self._note(line)
            except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
                raise RunDirectoryError(
                    f"{self._directory / 'samples.jsonl'}, line {self.count + 1}: no sample as a "
                    f"run writes them ({error}). Restore it from a copy"
                ) from error
            piece.append(line)
            if len(piece) == PIECE:
                yield piece
                piece = []
        if piece:
            yield piece

    def _note(self, line: Json) -> None:
        values = {name: line.get(name) for name in NUMBERS}
        values["length"] = length_of(line)
        # One number for every answer to one prompt: what it was answered early and late.
        values["prompt"] = self._prompts.setdefault(str(line.get("uid")), len(self._prompts))
        for name in ("reward", "advantage"):
            value = values[name]
            values[name] = None if value is None else float(f"{float(value):.{DIGITS}g}")
        values["status"] = str(line.get("status", ""))
        values["end"] = str(line.get("end") or line.get("finish_reason") or "")
        values["source"] = str(line.get("source") or "")
        for name, column in self.columns.items():
            column.append(values[name])
        for image in dict.fromkeys(images_in(line)):
            self.images.pop(image, None)
            self.images[image] = None


def length_of(line: Json) -> int:
    """Tokens of a response: where its last span of versions ends."""
    spans = line.get("versions") or []
    return max((int(span[2]) for span in spans), default=0)


def token_pieces(directory: Path, columns: Mapping[str, list[Any]]) -> Iterator[tuple[int, Json]]:
    """(step, place of a sample among all -> its tokens) for the newest steps with tensors.

    Args:
        directory: of the run.
        columns: of `Samples`, complete.
    """
    files = sorted((directory / ROLLOUTS).glob("step_????????.safetensors"), reverse=True)
    if not files:
        return
    from oxrl.report.tokens import TokenReader  # torch, which texts alone do without

    reader = TokenReader(directory)
    room = MOST_WITH_TOKENS
    for file in files:
        step = int(file.name[5:13]) + 1
        trained = zip(columns["step"], columns["advantage"], strict=True)
        places = [n for n, (at, value) in enumerate(trained) if at == step and value is not None]
        if room <= 0:
            return
        room -= len(places)
        yield step, reader.rows(file, places)
