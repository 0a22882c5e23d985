"""`oxrl train`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from oxrl.cli.console import ConfigFile, Overrides, load, say
from oxrl.commands.train import check_accepted, run
from oxrl.config import Config

Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint; start if there is none.")
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-changes",
        metavar="FIELD",
        help="Resume although this field, or a file that it names, changed, or `code`; repeatable.",
    ),
]
FromSamples = Annotated[
    str | None,
    typer.Option(
        "--from-samples",
        metavar="RUN",
        help="Train on the samples of this run, recorded with run.record=tokens; sample none.",
    ),
]
RolloutOnly = Annotated[
    bool, typer.Option("--rollout-only", help="Sample, score and record; train nothing.")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Run one step, the model shrunk and random, in a temporary folder."
    ),
]


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    accept: Accept = None,
    dry_run: DryRun = False,
    from_samples: FromSamples = None,
    rollout_only: RolloutOnly = False,
) -> None:
    """Train with any algorithm, chosen by train.alg_name."""
    asked = [*(overrides or [])]
    if from_samples is not None:
        asked.append(f"rollout.from_samples={json.dumps(from_samples)}")
    if rollout_only:
        asked.append("run.only=rollouts")
    train_or_rehearse(load(config, asked), resume=resume, accept=accept or [], dry_run=dry_run)


def train_or_rehearse(cfg: Config, *, resume: bool, accept: Sequence[str], dry_run: bool) -> None:
    check_accepted(accept, resume=resume)
    if not dry_run:
        run(cfg, resume=resume, accept=accept)
        return
    from oxrl.commands.dry_run import dry_run as take_one_step  # torch

    described = take_one_step(cfg)
    say(f"dry run done: one step on {described}; nothing was kept")
