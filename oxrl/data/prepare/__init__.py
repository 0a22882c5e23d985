"""Datasets in oxRL's JSONL, generated or from raw files: `oxrl prepare NAME --out DIR [--source
PATH] [key=value]`.
"""

from __future__ import annotations

import inspect
import json
import random
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from oxrl.data.prepare.generated import arithmetic, reasoning_gym
from oxrl.data.prepare.published import CONVERTERS, checked
from oxrl.data.rows import Record, file_hash, read_rows
from oxrl.errors import DataError, MissingExtraError
from oxrl.runs.files import write_atomically
from oxrl.seeds import stable_seed

# Where a dataset is on the hub (name, subset), and which files of it are wanted.
HUB = {"gsm8k": ("openai/gsm8k", "main")}
SPLITS = {"gsm8k": ("train", "test")}


def generate(
    make: Callable[..., tuple[Mapping[str, list[Any]], dict[str, Any]]],
    source: Path | None,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Write what `make` makes: rows by the stem of their file, and facts for the report; at most
    `limit` rows each.
    """
    name = make.__name__.replace("_", "-")
    if source is not None:
        raise DataError(f"{name} is generated: it reads no source, got {str(source)!r}")
    chosen = _options(make, options)
    files, facts = make(seed=seed, limit=limit, **chosen)
    return _write(out, files, {"dataset": name, "seed": seed, "limit": limit, **chosen, **facts})


def convert(
    name: str,
    source: Path | None,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Convert raw files, or the hub's copy, into files of the same names; `seed` chooses at most
    `limit` rows of each.

    Raises:
        DataError: no source, an unknown option, or a file of which no row can be used.
        MissingExtraError: the hub's copy is wanted without the `datasets` library.
    """
    chosen, wanted = _options(CONVERTERS[name], options), SPLITS.get(name, ())
    if source is None and name not in HUB:
        raise DataError(
            f"{name} is prepared from raw files: pass --source with a .jsonl or .parquet file, or a folder"
        )
    paths = _local_files(source, wanted) if source else {}
    raw = {stem: read_rows(path) for stem, path in paths.items()} or {
        s: _hub_rows(*HUB[name], s) for s in wanted
    }
    files: dict[str, list[dict[str, Any]]] = {}
    rejects: list[dict[str, str]] = []
    for stem, raw_rows in raw.items():
        rows: list[dict[str, Any]] = []
        for number, row in enumerate(raw_rows):
            try:
                made = [checked(fields) for fields in CONVERTERS[name](row.fields, **chosen)]
            except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
                reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
                rejects.append({"place": row.place, "reason": reason})
                continue
            tags = [
                f"{name}/{stem}/{number:06d}" + (f"/{i}" if len(made) > 1 else "")
                for i in range(len(made))
            ]
            rows += [
                {"uid": tag, "source": name, **fields}
                for tag, fields in zip(tags, made, strict=True)
            ]
        if not rows:
            raise DataError(
                f"{paths.get(stem, stem)}: no row can be used; {len(rejects)} rejected: {rejects[:1]}"
            )
        if limit is not None and limit < len(rows):  # in their original order
            kept = random.Random(stable_seed("prepare", seed)).sample(range(len(rows)), limit)
            rows = [rows[index] for index in sorted(kept)]
        files[stem] = rows
    facts = {
        "source": str(source or HUB[name][0]),
        "source_sha256": {p.name: file_hash(p) for p in paths.values()},
    }
    report = {"dataset": name, **facts, "seed": seed, "limit": limit, **chosen}
    return _write(out, files, {**report, "rejected": len(rejects), "rejects": rejects})


# (source, out, seed, limit, options, which may be text) -> report; writes the data files and
# report.json into `out`.
PREPARERS: dict[str, Callable[..., dict[str, Any]]] = {
    "arithmetic": partial(generate, arithmetic),
    "reasoning-gym": partial(generate, reasoning_gym),
    **{name: partial(convert, name) for name in CONVERTERS},
}


def _options(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of `function`, its keyword arguments but seed and limit: those `given`, maybe as
    text, and defaults.

    Raises:
        DataError: an unknown option, or text that is no such type; lists what there is.
    """
    types, parameters = (
        typing.get_type_hints(function),
        inspect.signature(function).parameters.values(),
    )
    own = {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name not in ("seed", "limit")
    }
    fields: dict[str, Any] = {name: (types[name], default) for name, default in own.items()}
    try:
        return create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)(
            **given
        ).model_dump()
    except ValidationError as error:
        wrong = "; ".join(
            f"option {e['loc'][0]}={e['input']!r}: {e['msg']}" for e in error.errors()
        )
        listed = ", ".join(f"{name}={default!r}" for name, default in own.items()) or "none"
        raise DataError(
            f"{wrong}; the options of {function.__name__} and their defaults: {listed}"
        ) from error


def _local_files(source: Path, wanted: Sequence[str]) -> dict[str, Path]:
    """The data files that `source` is or holds, by the stem of what is written; only `wanted`
    stems, if there are any.

    Raises:
        DataError: a folder without any, or with two of one name.
    """
    if not source.is_dir():
        return {source.stem if not wanted or source.stem in wanted else wanted[0]: source}
    paths = [path for path in sorted(source.iterdir()) if path.suffix in (".jsonl", ".parquet")]
    found = {path.stem: path for path in paths if not wanted or path.stem in wanted}
    if not found:
        raise DataError(f"{source} holds no {' or '.join(wanted) or 'file'}, .jsonl or .parquet")
    if twice := sorted(path.name for path in paths if found.get(path.stem, path) != path):
        raise DataError(
            f"{source} holds {found[Path(twice[0]).stem].name} beside {twice[0]}; pass one of them"
        )
    return {stem: found[stem] for stem in wanted or found if stem in found}


def _hub_rows(name: str, subset: str, split: str) -> Iterable[Record]:
    instead = "or pass --source with the raw files"
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        needs = f"fetching {name} by name needs the datasets library: pip install datasets"
        raise MissingExtraError(f"{needs}; {instead}") from error
    try:
        data = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot fetch {name} ({type(error).__name__}: {error}); {instead}"
        ) from error
    return (
        Record(f"{name} {split} row {number}", dict(row))
        for number, row in enumerate(data, start=1)
    )


def _write(
    out: Path, files: Mapping[str, Sequence[Any]], report: Mapping[str, Any]
) -> dict[str, Any]:
    """Write each stem's rows as JSONL and `report` with their counts as report.json, and return
    that.
    """
    out.mkdir(parents=True, exist_ok=True)
    for stem, rows in files.items():
        write_atomically(
            out / f"{stem}.jsonl",
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        )
    full = {**report, "written": {f"{stem}.jsonl": len(rows) for stem, rows in files.items()}}
    write_atomically(out / "report.json", json.dumps(full, indent=2, ensure_ascii=False) + "\n")
    return full
