"""`oxrl algorithms`."""

from __future__ import annotations

from typing import Annotated

import typer

from oxrl.commands.algorithm_page import describe
from oxrl.errors import ConfigError
from oxrl.tables.policy import ROWS, Row


def _complete_algorithm(incomplete: str) -> list[str]:
    return [name for name in ROWS if name.startswith(incomplete)]


def algorithms(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Print this one in full: cells, equations, numbers, source, deviation.",
            autocompletion=_complete_algorithm,
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Prove every row: gradients, identities, limits.")
    ] = False,
    family: Annotated[
        str, typer.Option(metavar="NAME", help="Rows of a recipe, or with a cell or a need.")
    ] = "",
) -> None:
    """Print the table of algorithms, or one in full; with --check, run every row's proofs."""
    if (check and (name or family)) or (name and family):
        raise typer.BadParameter("give one of NAME, --family and --check")
    if name is not None:
        typer.echo(describe(name))
        return
    if not check:
        typer.echo(algorithm_table(family))
        return
    from oxrl_proofs.rows import check_all  # torch

    reports = check_all()
    for name, report in reports.items():
        notes = [f"FAILED {proof}: {why}" for proof, why in report.failed.items()]
        notes += [f"exempt from {proof}: {why}" for proof, why in report.exempt.items()]
        typer.echo(f"{name:<30}{len(report.passed):>3} proofs  {'; '.join(notes)}".rstrip())
    passed = sum(len(report.passed) for report in reports.values())
    failed = sum(len(report.failed) for report in reports.values())
    typer.echo(f"{len(reports)} rows, {passed} proofs passed, {failed} failed")
    raise typer.Exit(1 if failed else 0)


HEADER = (
    "algorithm",
    "recipe",
    "advantage",
    "ratio",
    "loss",
    "correction",
    "centering",
    "kl",
    "weights",
    "needs",
)


def algorithm_table(family: str) -> str:
    """The table as text: a line of cells per algorithm, then a line of words per algorithm.

    Args:
        family: a recipe, or the name of a cell or need: only rows with it.

    Raises:
        ConfigError: no row has it.
    """
    rows = [row for row in ROWS.values() if not family or family in (*_cells(row), *row.needs)]
    if not rows:
        raise ConfigError(f"no algorithm has a recipe, cell or need {family!r}: try preference")
    table = [HEADER, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
    words = [f"{row.name}: {row.summary} ({row.source})".removesuffix(" ()") for row in rows]
    return "\n".join([*lines, "", *words])


def _cells(row: Row) -> tuple[str, ...]:
    cells = ("-",) * 6
    if row.recipe == "rl":
        ratio = row.ratio if row.ratio == "none" else f"{row.ratio}/{row.denominator}"
        cells = (row.advantage, ratio, row.gate, row.correction, row.centering, row.kl)
    return (row.name, row.recipe, *cells, row.weights, ", ".join(row.needs))
