"""`oxrl prepare`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from oxrl.entry_points import Offer, all_offers
from oxrl.errors import ConfigError, DataError, known
from oxrl.redact import shown

log = logging.getLogger(__name__)
Report = Mapping[str, object]


def preparers(wanted: str = "") -> dict[str, Callable[..., Report]]:
    """Everything that installed packages can prepare, by its name, oxRL's first.

    Args:
        wanted: no package is asked behind the one that has it; empty: all are asked.
    """
    found: dict[str, Callable[..., Report]] = {}
    for offer in all_offers("oxrl.datasets"):
        if wanted in found:
            break
        try:
            with offer.asked() as offered:
                there = {shown(name): partial(_prepared, offer, name) for name in offered}
        except ConfigError as error:
            log.warning("%s", error)
            continue
        found = there | found
    return found


def _prepared(offer: Offer, name: str, *args: object, **options: object) -> Report:
    with offer.asked() as offered:
        return offered[name](*args, **options)


def _complete_dataset(incomplete: str) -> list[str]:
    return [name for name in preparers() if name.startswith(incomplete)]


def prepare(
    dataset: Annotated[
        str,
        typer.Argument(
            help="Name of a dataset oxRL can prepare.", autocompletion=_complete_dataset
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="The dataset's own.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="Raw file or folder, or hf://datasets/OWNER/NAME/FILE; default: the dataset's own."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many rows.")] = None,
    test: Annotated[
        float | None,
        typer.Option(
            min=0, help="Rows put aside in test.jsonl, below 1 their share; no prompt is in both."
        ),
    ] = None,
) -> None:
    """Turn a raw dataset into JSONL or Parquet in oxRL's format."""
    offered = preparers(dataset)
    try:
        preparer = offered[known(dataset, offered)]
    except ValueError as error:
        raise DataError(f"dataset {dataset!r} {error}") from None
    extra: dict[str, str] = {}
    for option in options or []:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier():
            raise DataError(f"{option!r}: an option of {dataset} is written key=value")
        if key in ("source", "out", "seed", "limit", "test"):
            raise DataError(f"{option!r} is for every dataset: write --{key} {value}")
        extra[key] = value
    report = preparer(source, out, seed=seed, limit=limit, test=test, **extra)
    typer.echo(json.dumps(report, indent=2, ensure_ascii=False, default=str))
