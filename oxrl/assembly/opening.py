"""The session of a run from its configuration: what it looks at, and tells, when it begins."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.pins import packages_named, review_inputs
from oxrl.assembly.reference import reference_text
from oxrl.checkpoint.saving import Origin, SavingOptions
from oxrl.config import Config, dump_config
from oxrl.config.conditions import CODE
from oxrl.config.reads import resume_rules_of
from oxrl.config.sections.model import told_origin
from oxrl.entry_points import OURS, all_offers
from oxrl.errors import ConfigError
from oxrl.modelfiles.dims import vocabulary_of
from oxrl.recipes.session import Session, SessionOptions
from oxrl.runs.checkpoints import list_checkpoints
from oxrl.runs.directory import Allowed, RunDirectory, open_run
from oxrl.runs.files import json_safe, pretty_json

log = logging.getLogger(__name__)


def session_options(
    cfg: Config, *, resume: bool = False, accept: Sequence[str] = ()
) -> SessionOptions:
    """Read from a configuration what surrounds the loop of its run.

    Args:
        resume: go on in a directory that has a run.
        accept: fields that may differ from those of that run.
    """
    run = cfg.run
    return SessionOptions(
        open=partial(_open_directory, cfg, resume=resume, accept=accept),
        directory=run.directory,
        name=run.name,
        steps=run.steps,
        console=run.console,
        eval_every=run.eval_every,
        checkpoint_every=run.checkpoint_every,
        stop_at=run.stop_at,
        keep_checkpoints=run.keep_checkpoints,
        saving=_saving_options(cfg),
        max_skipped_steps=cfg.train.max_skipped_steps,
        trackers=run.shown_in,
        vocabulary=vocabulary_of(cfg.model.name),
        health=run.health,
    )


def announce(cfg: Config, session: Session, *, resume: bool) -> None:
    """Tell what is to be known before a run: models that a default or the name of a run asked for,
    and that a resume finds nothing to go on from.
    """
    told: list[str] = []
    if resume and not list_checkpoints(session.run.checkpoints):
        told.append(f"{cfg.run.directory} has no checkpoint to go on from: it starts anew")
    models = {"policy": told_origin(cfg.model.name), "reference": reference_text(cfg)}
    told += [f"{what}: {text}" for what, text in models.items() if text]
    for text in told:
        log.info(text)
        session.message(text)


def _open_directory(cfg: Config, *, resume: bool, accept: Sequence[str]) -> RunDirectory:
    """The directory of a run, with what its inputs and its machine are noted there."""
    return open_run(
        cfg.run.directory,
        dump_config(cfg),
        resume=resume,
        allowed=Allowed(resume_rules_of(cfg), frozenset(accept)),
        review=partial(review_inputs, cfg),
        noted=_noted_of_packages(cfg),
        is_finished=_is_finished,
    )


def _saving_options(cfg: Config) -> SavingOptions:
    origin = Origin(
        run=cfg.run.directory, model=cfg.model.name, dtype=cfg.model.dtype, seed=cfg.run.seed
    )
    return SavingOptions(
        background=cfg.run.async_checkpoints,
        waits=cfg.run.waits,
        origin=origin,
        first_refers=cfg.run.first_checkpoint == "reference",
        contract=Assembly(cfg).contract,
    )


def _is_finished(run: Path, steps: int) -> tuple[bool, str]:
    from oxrl.checkpoint.finished import is_finished  # a run that begins is not

    return is_finished(run, steps)


def _noted_of_packages(cfg: Config) -> Mapping[str, object]:
    """Ask packages what to note of this machine where programs may run: oxRL's sandbox for its
    layers, and each package of which the run names something.
    """
    if CODE not in cfg.reward.names and not cfg.environment.name:
        return {}
    named = {OURS, *packages_named(cfg)}
    noted: dict[str, object] = {}
    for offer in all_offers("oxrl.machine_notes"):
        if offer.package not in named or offer.name in noted:
            continue
        try:
            with offer.asked() as notes:
                noted[offer.name] = json_safe(json.loads(pretty_json(notes()).encode()))
        except ConfigError as error:
            log.warning("%s", error)
            noted[offer.name] = str(error)
    return noted
