"""What a run holds open from its beginning to its end: directory, records, console, trackers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

from oxrl.assembly.pins import review_inputs
from oxrl.config import Config, dump_config
from oxrl.config.origins import told_origin
from oxrl.config.reward_options import CODE
from oxrl.modelfiles.dims import vocabulary_of
from oxrl.plan.reference import reference_text
from oxrl.runs.checkpoints import list_checkpoints
from oxrl.runs.console import Console, run_logging
from oxrl.runs.directory import RunDirectory, open_run
from oxrl.runs.health import Health
from oxrl.runs.recorder import Recorder
from oxrl.runs.stop import StopRequest
from oxrl.runs.trackers.mirrors import Trackers

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Everything a session works with that has to be closed, and what it reads signs of trouble
    from.
    """

    run: RunDirectory
    stop: StopRequest
    recorder: Recorder
    health: Health
    console: Console
    trackers: Trackers


def open_session(
    cfg: Config, stack: ExitStack, *, resume: bool, accept: Sequence[str] = ()
) -> Opened:
    """Open the run directory first, then what writes into it.

    Args:
        stack: closes everything, the directory last.
        resume: go on in a directory that has a run.
        accept: fields that may differ from those of that run.
    """
    directory = open_run(
        cfg.run.directory,
        dump_config(cfg),
        resume=resume,
        accept=accept,
        review=partial(review_inputs, cfg),
        noted=_noted_of_sandbox(cfg),
        is_finished=_is_finished,
    )
    run = stack.enter_context(directory)
    stack.enter_context(run_logging(run.path / "run.log", cfg.run.console))
    run.log_remarks()
    stop = stack.enter_context(StopRequest())
    recorder = stack.enter_context(Recorder(run))
    health = Health(vocabulary_of(cfg.model.name), cfg.run.health)
    console = stack.enter_context(Console(cfg.run.steps, cfg.run.name, mode=cfg.run.console))
    trackers = stack.enter_context(Trackers(run, cfg.run.shown_in))
    if not run.finished:
        for text in _announced(cfg, anew=resume and not list_checkpoints(run.checkpoints)):
            log.info(text)
            console.message(text)
    return Opened(
        run=run,
        stop=stop,
        recorder=recorder,
        health=health,
        console=console,
        trackers=trackers,
    )


def _is_finished(run: Path, steps: int) -> tuple[bool, str]:
    from oxrl.checkpoint.finished import is_finished  # a run that begins is not

    return is_finished(run, steps)


def _noted_of_sandbox(cfg: Config) -> Mapping[str, object]:
    """The layers of the sandbox that this machine offers, where a program may run in it."""
    if CODE not in cfg.reward.names and not cfg.environment.name:
        return {}
    return {noted.name: noted.load()() for noted in entry_points(group="oxrl.machine_notes")}


def _announced(cfg: Config, *, anew: bool) -> Iterator[str]:
    """What is told before a run: models that a default or the name of a run asked for, and that a
    resume finds nothing to go on from.

    Args:
        anew: it does.
    """
    if anew:
        yield f"{cfg.run.directory} has no checkpoint to go on from: it starts anew"
    told = {"policy": told_origin(cfg.model.name), "reference": reference_text(cfg)}
    yield from (f"{what}: {text}" for what, text in told.items() if text)
