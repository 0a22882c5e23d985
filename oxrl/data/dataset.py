"""What all datasets share: the rows of a file read once and counted, and drawn in a seeded endless order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, Self, TypeVar

from oxrl.data.chat import TemplateError
from oxrl.data.order import index_at
from oxrl.data.rows import Row, file_hash, read_rows
from oxrl.errors import DataError

Unit = TypeVar("Unit")
Overlong = Literal["drop", "error"]


@dataclass(frozen=True, kw_only=True)
class Encoded(Generic[Unit]):
    """What a row became; `tokens` counts its longest unit, `counts` goes into the dataset's report."""

    units: Sequence[Unit]
    tokens: int
    special_text: bool
    counts: Mapping[str, int] = field(default_factory=dict[str, int])


class Dataset(Generic[Unit]):
    """Units in file order, each ready to sample from or to train on.

    `report` counts rows, kept, overlong and empty (both dropped), special_text (rows that hold the text of a special
    token, encoded as text), longest (tokens) and what the dataset adds; and names the file's path and sha256.
    """

    def __init__(self, units: Sequence[Unit], report: Mapping[str, int | str]) -> None:
        self._units = list(units)
        self.report = dict(report)

    def __len__(self) -> int:
        return len(self._units)

    def at(self, draw: int, *, seed: int) -> Unit:
        """The unit at global position `draw` of the shuffled, endless order of `seed`."""
        return self._units[index_at(draw, len(self._units), seed)]

    def in_order(self) -> list[Unit]:
        """Every unit once, in file order."""
        return list(self._units)

    @classmethod
    def _read(
        cls,
        path: str | Path,
        encode: Callable[[Row], Encoded[Unit] | str],
        counts: Sequence[str],
        *,
        noun: str,
        max_tokens: int | None,
        overlong: Overlong,
        limit: int | None,
    ) -> Self:
        """Encode the rows of `path` until `limit` are kept; `encode` may return the count under which one is dropped.

        Raises:
            DataError: a row cannot be read or encoded, is longer than `max_tokens` where `overlong` is "error", or no
                row is left; names row or counts.
        """
        units: list[Unit] = []
        report = dict.fromkeys(("rows", "kept", "empty", "overlong", "special_text", "longest", *counts), 0)
        for row in read_rows(path):
            if limit is not None and report["kept"] >= limit:
                break
            report["rows"] += 1
            try:
                encoded = encode(row)
            except TemplateError as error:
                raise DataError(f"{row.place}: {error}") from error
            if isinstance(encoded, str):
                report[encoded] += 1
                continue
            if max_tokens is not None and encoded.tokens > max_tokens:
                if overlong == "error":
                    row.fail(
                        f"the {noun} has {encoded.tokens} tokens, more than {max_tokens}",
                        "shorter ones, a larger data.max_prompt_tokens or model.max_length, or data.overlong: drop",
                    )
                report["overlong"] += 1
                continue
            report |= {name: report[name] + count for name, count in encoded.counts.items()}
            report["kept"] += 1
            report["special_text"] += encoded.special_text
            report["longest"] = max(report["longest"], encoded.tokens)
            units += encoded.units
        if not units:
            raise DataError(
                f"{path}: no {noun} is left to train on: {report['rows']} rows, {report['empty']} empty, "
                f"{report['overlong']} longer than {max_tokens} tokens"
            )
        return cls(units, {"path": str(path), "sha256": file_hash(path), **report})
