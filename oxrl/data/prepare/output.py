"""What every preparer writes: JSONL files and a report of where the rows came from and which were left out."""

from __future__ import annotations

import inspect
import json
import os
import random
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from oxrl.errors import DataError
from oxrl.seeds import stable_seed

Item = TypeVar("Item")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write one JSON object per line and return how many; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    count = 0
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        for count, row in enumerate(rows, start=1):  # noqa: B007 - the count is the result
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(partial, path)
    return count


def write_report(out: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Write `report` to report.json beside the data, and return it."""
    (out / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def choose(items: Sequence[Item], limit: int | None, seed: int) -> list[Item]:
    """At most `limit` of `items`, chosen by `seed`, in their original order."""
    if limit is None or limit >= len(items):
        return list(items)
    kept = random.Random(stable_seed("prepare", seed)).sample(range(len(items)), limit)
    return [items[index] for index in sorted(kept)]


def read_options(preparer: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, written as text on a command line, as the types that `preparer` declares.

    Raises:
        DataError: an unknown option, or text that is no such type; lists what there is.
    """
    types = typing.get_type_hints(preparer)
    parameters = inspect.signature(preparer).parameters
    own = {name: p.default for name, p in parameters.items() if name not in ("source", "out", "seed", "limit")}
    read: dict[str, Any] = {}
    for name, value in options.items():
        if name not in own:
            listed = ", ".join(f"{key}={default!r}" for key, default in own.items()) or "none"
            raise DataError(f"{preparer.__name__} has no option {name!r}; its options and defaults: {listed}")
        read[name] = _read_option(name, value, types[name]) if isinstance(value, str) else value
    return read


def _read_option(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise DataError(f"option {name}={text!r} must be true or false")
        return text == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise DataError(f"option {name}={text!r} is no {kind.__name__}") from error
