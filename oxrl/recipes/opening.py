"""What a run looks at, and what it tells, when it begins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

from oxrl.assembly.pins import review_inputs
from oxrl.checkpoint.saving import Origin, Saver, SavingOptions
from oxrl.config import Config, dump_config
from oxrl.config.origins import told_origin
from oxrl.config.reads import resume_rules
from oxrl.config.reward_options import CODE
from oxrl.plan.reference import reference_text
from oxrl.runs.checkpoints import list_checkpoints
from oxrl.runs.console import Console
from oxrl.runs.directory import Allowed, RunDirectory, open_run
from oxrl.runs.ranks import Ranks

log = logging.getLogger(__name__)


def open_directory(cfg: Config, *, resume: bool, accept: Sequence[str] = ()) -> RunDirectory:
    """The directory of a run, with what its inputs and its machine are noted there.

    Args:
        resume: go on in a directory that has a run.
        accept: fields that may differ from those of that run.
    """
    return open_run(
        cfg.run.directory,
        dump_config(cfg),
        resume=resume,
        allowed=Allowed(resume_rules(), frozenset(accept)),
        review=partial(review_inputs, cfg),
        noted=_noted_of_sandbox(cfg),
        is_finished=_is_finished,
    )


def new_saver(cfg: Config, ranks: Ranks, *, say: Callable[[str], None]) -> Saver:
    """Make what writes the checkpoints of a run.

    Args:
        say: tells the user something.
    """
    origin = Origin(
        run=cfg.run.directory, model=cfg.model.name, dtype=cfg.model.dtype, seed=cfg.run.seed
    )
    saving = SavingOptions(
        background=cfg.run.async_checkpoints,
        waits=cfg.run.waits,
        origin=origin,
        first_refers=cfg.run.first_checkpoint == "reference",
    )
    return Saver(ranks, saving, say=say)


def _is_finished(run: Path, steps: int) -> tuple[bool, str]:
    from oxrl.checkpoint.finished import is_finished  # a run that begins is not

    return is_finished(run, steps)


def _noted_of_sandbox(cfg: Config) -> Mapping[str, object]:
    """The layers of the sandbox that this machine offers, where a program may run in it."""
    if CODE not in cfg.reward.names and not cfg.environment.name:
        return {}
    return {noted.name: noted.load()() for noted in entry_points(group="oxrl.machine_notes")}


def announce(cfg: Config, run: RunDirectory, console: Console, *, resume: bool) -> None:
    """Tell what is to be known before a run: models that a default or the name of a run asked for,
    and that a resume finds nothing to go on from.
    """
    told: list[str] = []
    if resume and not list_checkpoints(run.checkpoints):
        told.append(f"{cfg.run.directory} has no checkpoint to go on from: it starts anew")
    models = {"policy": told_origin(cfg.model.name), "reference": reference_text(cfg)}
    told += [f"{what}: {text}" for what, text in models.items() if text]
    for text in [] if run.finished else told:
        log.info(text)
        console.message(text)
