"""What preparers read and write: options, raw rows of local files or of the hub, JSONL files with a report."""

from __future__ import annotations

import inspect
import json
import os
import random
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError, create_model

from oxrl.data.rows import Row
from oxrl.errors import DataError, MissingExtraError
from oxrl.seeds import stable_seed

Item = TypeVar("Item")


def read_options(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of `function`, its keyword arguments but seed and limit: those `given`, maybe as text, and defaults.

    Raises:
        DataError: an unknown option, or text that is no such type; lists what there is.
    """
    types, parameters = typing.get_type_hints(function), inspect.signature(function).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("seed", "limit")}
    fields: dict[str, Any] = {name: (types[name], default) for name, default in own.items()}
    try:
        return create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)(**given).model_dump()
    except ValidationError as error:
        wrong = "; ".join(
            f"option {problem['loc'][0]}={problem['input']!r}: {problem['msg']}" for problem in error.errors()
        )
        listed = ", ".join(f"{name}={default!r}" for name, default in own.items()) or "none"
        raise DataError(f"{wrong}; the options of {function.__name__} and their defaults: {listed}") from error


def local_files(source: Path, wanted: Sequence[str]) -> dict[str, Path]:
    """The data files that `source` is or holds, by the stem of what is written; only `wanted` stems, if there are any.

    Raises:
        DataError: a folder without any.
    """
    if not source.is_dir():
        return {source.stem if not wanted or source.stem in wanted else wanted[0]: source}
    paths = [*sorted(source.glob("*.jsonl")), *sorted(source.glob("*.parquet"))]
    found = {path.stem: path for path in paths if not wanted or path.stem in wanted}
    if not found:
        raise DataError(f"{source} holds no {' or '.join(wanted) or 'file'}, .jsonl or .parquet")
    return {stem: found[stem] for stem in wanted or found if stem in found}


def hub_rows(name: str, subset: str, split: str) -> Iterable[Row]:
    """Rows of a dataset on the hub, which need the `datasets` library and a network."""
    instead = "or pass --source with the raw files"
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            f"fetching {name} by name needs the datasets library: pip install datasets; {instead}"
        ) from error
    try:
        data = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot fetch {name} ({type(error).__name__}: {error}); {instead}") from error
    return (Row(f"{name} {split} row {number}", dict(row)) for number, row in enumerate(data, start=1))


def choose(items: Sequence[Item], limit: int | None, seed: int) -> list[Item]:
    """At most `limit` of `items`, chosen by `seed`, in their original order."""
    if limit is None or limit >= len(items):
        return list(items)
    kept = random.Random(stable_seed("prepare", seed)).sample(range(len(items)), limit)
    return [items[index] for index in sorted(kept)]


def write_files(out: Path, files: Mapping[str, Sequence[Any]], report: Mapping[str, Any]) -> dict[str, Any]:
    """Write each stem's rows as JSONL and `report` with their counts as report.json, and return that."""
    out.mkdir(parents=True, exist_ok=True)
    for stem, rows in files.items():
        partial = out / f".{stem}.partial"  # the file appears whole or not at all
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.replace(partial, out / f"{stem}.jsonl")
    full = {**report, "written": {f"{stem}.jsonl": len(rows) for stem, rows in files.items()}}
    (out / "report.json").write_text(json.dumps(full, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return full
