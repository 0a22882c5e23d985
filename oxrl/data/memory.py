"""Rows that a program holds, as the lines of a data file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from oxrl.errors import DataError
from oxrl.types import Objects, Values

EXPECTED = 'a list of mappings, such as [{"prompt": "1+1?", "answer": "2"}, ...]'


def lines_of(rows: object, argument: str) -> str:
    """JSONL text of rows.

    Args:
        rows: mappings, in a list or anything else that can be gone through; or a data frame.
        argument: of the caller's by which they were given, for errors.

    Returns:
        A line for each row, in their order.

    Raises:
        DataError: there are none, or one is no mapping of what JSON can hold; names it.
    """
    lines: list[str] = []
    for index, row in enumerate(_each(rows, argument)):
        if not isinstance(row, Mapping):
            kind = type(row).__name__
            raise DataError(f"{argument}, row {index}: is {kind}, no mapping; give {EXPECTED}")
        fields = {str(name): value for name, value in row.items()}
        try:
            text = json.dumps(fields, ensure_ascii=False, allow_nan=False, default=_plain)
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"holds what a data file cannot: {error}"
            raise DataError(f"{argument}, row {index}: {problem}; give {EXPECTED}") from error
        lines.append(text + "\n")
    if not lines:
        raise DataError(f"{argument}: there are no rows; give {EXPECTED}")
    return "".join(lines)


def _each(rows: Any, argument: str) -> Iterable[object]:
    """Return the rows one by one; of a data frame its records, missing values left out."""
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        return [_known(record) for record in rows.to_dict(orient="records")]
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise DataError(f"{argument}: is {type(rows).__name__}; give {EXPECTED}")
    return rows


def _known(record: Objects) -> Values:
    """Drop what is missing in a record of a data frame: such a value is not equal to itself."""
    found: Values = {}
    for name, value in record.items():
        missing = value is None or (isinstance(value, float) and value != value)
        if not missing:
            found[name] = value
    return found


def _plain(value: Any) -> object:
    """Turn a number or an array of numpy's into JSON.

    Raises:
        TypeError: it is something else.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__}: {value!r:.80}")
