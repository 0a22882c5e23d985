"""`oxrl eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from oxrl.cli.console import Out, Overrides
from oxrl.models.lazy_transformers import import_model_classes

# Metrics that stand behind the one of which they are the interval.
ENDS = ("_low", "_high")


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN|CHECKPOINT|MODEL",
            help="Config, run (its newest checkpoint), checkpoint, or model by folder or name.",
        ),
    ],
    overrides: Overrides = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Default: rollout.eval_samples.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Default: rollout.eval_temperature.")
    ] = None,
    pick: Annotated[
        str | None, typer.Option(help="Another reward: score its favorite of each prompt's.")
    ] = None,
    out: Out = None,
) -> None:
    """Reward, pass@k and best-of-k on held-out data; of supervised runs loss and perplexity."""
    import_model_classes()
    from oxrl.commands.evaluate import run_eval  # torch

    metrics = run_eval(
        target, overrides or [], samples=samples, temperature=temperature, pick=pick, out=out
    )
    from oxrl.runs.console import bounds

    for name, value in metrics.items():
        if not name.endswith(ENDS):
            typer.echo(f"{name:<24}{value:.6g}{bounds(metrics, name)}")
