"""Datasets in oxRL's JSONL, generated or from raw files: `oxrl prepare NAME --out DIR [--source PATH] [key=value]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from oxrl.data.prepare.arithmetic import arithmetic
from oxrl.data.prepare.files import choose, hub_rows, local_files, read_options, write_files
from oxrl.data.prepare.procedural import reasoning_gym
from oxrl.data.prepare.published import CONVERTERS, checked
from oxrl.data.rows import file_hash, read_rows
from oxrl.errors import DataError

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
    """Write what `make` makes: rows by the stem of their file, and facts for the report; at most `limit` rows each."""
    name = make.__name__.replace("_", "-")
    if source is not None:
        raise DataError(f"{name} is generated: it reads no source, got {str(source)!r}")
    chosen = read_options(make, options)
    files, facts = make(seed=seed, limit=limit, **chosen)
    return write_files(out, files, {"dataset": name, "seed": seed, "limit": limit, **chosen, **facts})


def convert(
    name: str, source: Path | None, out: Path, *, seed: int = 0, limit: int | None = None, **options: Any
) -> dict[str, Any]:
    """Convert raw files, or the hub's copy, into files of the same names; `seed` chooses at most `limit` rows of each.

    Raises:
        DataError: no source, an unknown option, or a file of which no row can be used.
        MissingExtraError: the hub's copy is wanted without the `datasets` library.
    """
    chosen, wanted = read_options(CONVERTERS[name], options), SPLITS.get(name, ())
    if source is None and name not in HUB:
        raise DataError(f"{name} is prepared from raw files: pass --source with a .jsonl or .parquet file, or a folder")
    paths = local_files(source, wanted) if source else {}
    raw = {stem: read_rows(path) for stem, path in paths.items()} or {s: hub_rows(*HUB[name], s) for s in wanted}
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
            tags = [f"{name}/{stem}/{number:06d}" + (f"/{i}" if len(made) > 1 else "") for i in range(len(made))]
            rows += [{"uid": tag, "source": name, **fields} for tag, fields in zip(tags, made, strict=True)]
        if not rows:
            raise DataError(f"{paths.get(stem, stem)}: no row can be used; {len(rejects)} rejected: {rejects[:1]}")
        files[stem] = choose(rows, limit, seed)
    facts = {"source": str(source or HUB[name][0]), "source_sha256": {p.name: file_hash(p) for p in paths.values()}}
    report = {"dataset": name, **facts, "seed": seed, "limit": limit, **chosen}
    return write_files(out, files, {**report, "rejected": len(rejects), "rejects": rejects})


# (source, out, seed, limit, options, which may be text) -> report; writes the data files and report.json into `out`.
PREPARERS: dict[str, Callable[..., dict[str, Any]]] = {
    "arithmetic": partial(generate, arithmetic),
    "reasoning-gym": partial(generate, reasoning_gym),
    **{name: partial(convert, name) for name in CONVERTERS},
}
