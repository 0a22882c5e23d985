"""`oxrl train`: a run from its configuration to its end, begun again where ranks are lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING

from oxrl.errors import ConfigError, LostRankError, did_you_mean
from oxrl.runs.os_errors import explained

if TYPE_CHECKING:
    from oxrl.assembly.assembly import Assembly
    from oxrl.config import Config
    from oxrl.recipes.session import Session
    from oxrl.runs.ranks import Ranks


def run(cfg: Config, *, resume: bool = False, accept: Sequence[str] = ()) -> None:
    """Run the recipe of `train.alg_name` in its run directory.

    Args:
        resume: go on from the newest checkpoint, if there is one.
        accept: fields of the config that may differ, or stand for other files, than at the start
            of the run that is resumed; each of them must.

    Raises:
        ConfigError: lists what is wrong across sections, however `cfg` was made.
        OxrlError: anything else a user can mend; `exit_code` says how the program should end. Lost
            training ranks are among them only after `run.max_restarts` starts from the newest
            checkpoint.
    """
    # Imported here: whoever asks for `check_accepted` alone needs no checks.
    from oxrl.config import check_config

    check_accepted(accept, resume=resume)
    check_config(cfg)
    if not resume:  # one that goes on has its model noted, and says what has changed
        check_models_on_hub(cfg)
    lost: LostRankError | None = None
    for restarts_left in reversed(range(cfg.run.max_restarts + 1)):
        try:
            with explained():
                if lost is None:
                    return _run(cfg, resume=resume, accept=accept)
                return _again(cfg, lost)
        except LostRankError as error:
            if not restarts_left:
                raise
            lost = error


def _again(cfg: Config, lost: LostRankError) -> None:
    """Go on from the newest checkpoint after ranks were lost.

    Raises:
        LostRankError: the cluster that is left has no room for them, or is gone.
    """
    try:
        _run(cfg, resume=True, after=lost)
    except ConfigError as error:  # nothing is wrong with a configuration that has run before
        raise LostRankError(f"{lost}; starting again: {error}") from error


def check_models_on_hub(cfg: Config) -> None:
    """Whether models that are not here can be had, before the libraries that read them start.

    Raises:
        DataError: one cannot.
    """
    # Imported here: only names on the hub cost that.
    from oxrl.modelfiles.builtin import is_builtin
    from oxrl.modelfiles.folder import hub_source, refuse_missing_folder
    from oxrl.modelfiles.hub_status import check_on_hub

    if not is_builtin(cfg.model.name):
        refuse_missing_folder(cfg.model.name)
    source = hub_source(cfg.model.name, cfg.model.revision)
    if source is not None:
        check_on_hub(*source, "model.name")


# Of one part of a reward, as reward.parts.correct.weight.
PART_FIELD = re.compile(r"reward\.parts\.[^.]+\.[a-z_]+")


def check_accepted(accept: Sequence[str], *, resume: bool) -> None:
    """Changes are accepted by names of fields, of a run that is resumed.

    Raises:
        ConfigError: no such field, or nothing is resumed.
    """
    from oxrl.config.schema import FIELDS

    for name in accept:
        if name not in FIELDS and not PART_FIELD.fullmatch(name):
            hint = did_you_mean(name, FIELDS)
            form = "section.field, such as train.lr"
            raise ConfigError(f"--accept-changes {name}: no such field; write {form}{hint}")
    if accept and not resume:
        raise ConfigError(
            f"--accept-changes {accept[0]} is for a run that goes on: add --resume, or leave it out"
        )


def _run(
    cfg: Config, *, resume: bool, accept: Sequence[str] = (), after: LostRankError | None = None
) -> None:
    from oxrl.models.lazy_transformers import import_model_classes

    import_model_classes()  # before anything below imports them
    from oxrl.assembly.opening import announce
    from oxrl.plan.preflight import Prepared, prepare_to_begin

    with (
        training_ranks(cfg) as ranks,
        closing(prepare_to_begin(cfg) if ranks.first else Prepared()) as prepared,
        session_of(cfg, ranks, resume=resume, accept=accept) as session,
    ):
        if ranks.agree(ranks.first and session.run.finished):
            session.message(f"{cfg.run.directory} is already complete; nothing to do")
            return
        if ranks.first:
            announce(cfg, session, resume=resume)
        if after is not None:
            session.message(f"{after}\nStarting the whole group again from the newest checkpoint")
        session.pool = prepared.pool
        begin(cfg, session)


def training_ranks(cfg: Config) -> AbstractContextManager[Ranks]:
    """This process's place among `run.training_gpus` ranks; joins the others that the launcher
    started.

    Raises:
        ConfigError: the launcher started another number of processes than the configuration says.
    """
    from oxrl.runs.ranks import ALONE, launched_world

    world = launched_world()
    asked = cfg.run.training_gpus
    if cfg.recipe == "rl":
        if world > 1:
            raise ConfigError(
                "start reinforcement learning once, not with torchrun: its ranks are Ray actors"
            )
        return nullcontext(ALONE)
    if world != asked:
        hint = (
            "set run.training_gpus, or start with"
            if cfg.train.backend != "local"
            else "train.backend is local:"
        )
        raise ConfigError(
            f"run.training_gpus is {asked} and the launcher started {world} processes "
            f"(WORLD_SIZE); {hint} "
            f"torchrun --nproc-per-node {asked} main_sl.py --config ..."
        )
    if cfg.train.backend == "local":
        return nullcontext(ALONE)
    # Several processes.
    from oxrl.assembly.assembly import Assembly
    from oxrl.engines.train.joined_ranks import joined_ranks

    return joined_ranks(Assembly(cfg).device, cfg.run.waits)


def session_of(cfg: Config, ranks: Ranks, *, resume: bool, accept: Sequence[str]) -> Session:
    """The session of a run; of the ranks but the first one that writes no file."""
    from oxrl.assembly.opening import session_options
    from oxrl.recipes.session import Session

    options = session_options(cfg, resume=resume, accept=accept)
    if ranks.first:
        return Session(options, ranks)
    from oxrl.recipes.follower import Follower  # several ranks

    return Follower(options, ranks)


def begin(cfg: Config, session: Session) -> None:
    """Settle what a configuration leaves open, and go through its loop.

    Where the weights turn out to be no good for prompts read once, the loop begins anew without.

    Args:
        session: of the run.
    """
    from oxrl.assembly.settle import settle, without_sharing
    from oxrl.models.shared_prefix import SharingRefused

    settled = settle(cfg, session)
    try:
        _note_and_train(settled, session)
    except SharingRefused as refusal:
        if settled.train.share_prefix == cfg.train.share_prefix:  # it was asked for
            raise
        _note_and_train(without_sharing(settled, session, refusal), session)


def _note_and_train(cfg: Config, session: Session) -> None:
    """Note in the run directory what a run is made with, and go through its loop."""
    from oxrl.assembly.assembly import Assembly

    assembly = Assembly(cfg, session.ranks)
    if assembly.images is not None:
        from oxrl.assembly.images import keep_images  # a run of text alone has none

        keep_images(assembly.images, cfg, write=session.ranks.first)
    if assembly.actions is not None and session.ranks.first:
        assembly.actions.write(cfg.run.directory)
    if session.ranks.first and cfg.recipe == "rl":
        from oxrl.assembly.assemble import note_machine

        note_machine(assembly)
    train(assembly, session)


def train(assembly: Assembly, session: Session) -> None:
    """Build what a run works with, and go through its loop; only that one is imported.

    Args:
        assembly: has the parts.
        session: of the run.
    """
    cfg = assembly.cfg
    if cfg.recipe == "rl":
        from oxrl.assembly.assemble import assemble

        machine = assemble(assembly, session.clock, session.stopping, session.pool)
        session.closing(machine.close)
        if cfg.run.only is not None:
            from oxrl.recipes import rollouts_only as loop
        else:
            from oxrl.recipes import rl as loop
        loop.train(machine, session)
    else:
        from oxrl.assembly.assemble_offline import assemble_offline
        from oxrl.recipes import offline_loop

        offline_loop.train(assemble_offline(assembly, session), session)
