"""`oxrl score`, `oxrl compare` and `oxrl contamination`, as the command line declares them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.console import Overrides, say, writable
from oxrl.models.lazy_transformers import import_model_classes


def score(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory with samples.jsonl.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[reward.KEY=VALUE]...", help="Another reward, or other settings of the run's."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", callback=writable, help="Write both scores of every sample there, as JSONL."
        ),
    ] = None,
) -> None:
    """Score the samples of a run with another reward; say what would have changed."""
    import_model_classes()
    from oxrl_stats.score import report, run_score  # torch

    say(report(run_score(run, overrides or [], out)))


def compare(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [KEY=VALUE]...",
            help="Runs, checkpoints, models, or two files of `oxrl eval --out`.",
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(help="A file of prompts; may be given several times. Default: data.eval."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Default: rollout.eval_samples.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Default: rollout.eval_temperature.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: run.seed of A.")] = None,
    control: Annotated[
        str | None, typer.Option(metavar="RUN", help="A run that must not have improved.")
    ] = None,
    select: Annotated[
        bool, typer.Option("--select", help="Choose the best on half of the prompts.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", callback=writable, help="Write a JSON file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", callback=writable, help="Draw it, as SVG.")
    ] = None,
) -> None:
    """Is A better than B? The same prompts and seeds for both, with intervals and tests."""
    import_model_classes()
    from oxrl_stats.compare import Options, run_compare, table  # torch

    names = [name for name in targets if not is_override(name)]
    overrides = [name for name in targets if is_override(name)]
    options = Options(
        fields=tuple(overrides),
        data=tuple(data or ()),
        samples=samples,
        temperature=temperature,
        seed=seed,
    )
    found = run_compare(names, options, control=control, select=select, out=out)
    if plot is not None:
        from oxrl_stats.plots import draw_intervals  # matplotlib

        draw_intervals(found.rows, plot)
    say(table(found))


def is_override(text: str) -> bool:
    """True for `section.field=value` and `~section.field`, which are no names of models.

    Args:
        text: of the command line.
    """
    field, equals, _ = text.partition("=")
    return text.startswith("~") or (bool(equals) and "." in field and not Path(text).exists())


def contamination(
    target: Annotated[str, typer.Argument(metavar="RUN|CONFIG", help="Whose training data.")],
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option(help="The held-out file. Default: data.eval.")] = None,
    answers: Annotated[
        Path | None,
        typer.Option(help="A file of `oxrl eval --out`: rewards with and without what is found."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", callback=writable, help="Write a JSON file.")
    ] = None,
) -> None:
    """Find held-out prompts that stand in the training data, and the rows where they do."""
    from oxrl_stats.contamination import run_contamination, told

    say(told(run_contamination(target, overrides or [], data=data, answers=answers, out=out)))
