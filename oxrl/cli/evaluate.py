"""`oxrl eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.console import Out, Overrides, say, writable
from oxrl.entry_points import STATISTICS, own_function
from oxrl.errors import ConfigError
from oxrl.models.lazy_transformers import import_model_classes


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
    budgets: Annotated[
        str | None,
        typer.Option(metavar="B1,B2,...", help="Accuracy by the most tokens of a response."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", callback=writable, help="Draw --budgets, as SVG.")
    ] = None,
) -> None:
    """Reward, pass@k and best-of-k on held-out data; of supervised runs loss and perplexity."""
    import_model_classes()
    from oxrl.commands.evaluate import evaluate_target, told  # torch

    if budgets is not None:
        by_budget = own_function(STATISTICS, "run_budgets")
        if by_budget is None:
            raise ConfigError("--budgets needs the packages beside oxRL: install it with pip")
        for option, value in (("--pick", pick), ("--out", out)):
            if value is not None:
                raise ConfigError(f"{option} is for one budget; leave out --budgets")
        given = {"samples": samples, "temperature": temperature, "plot": plot}
        say(by_budget(target, overrides or [], budgets, **given))
        return
    if plot is not None:
        raise ConfigError("--plot draws what --budgets B1,B2,... measures; write that too")
    found = evaluate_target(
        target, overrides or [], samples=samples, temperature=temperature, pick=pick, out=out
    )
    say(told(found))
