"""A run whose configuration was checked: what that leaves open is settled, and its loop begins."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import date

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.opening import announce, session_options
from oxrl.assembly.settle import settle, without_sharing
from oxrl.config import Config
from oxrl.errors import ConfigError, LostRankError
from oxrl.flat_config import recorded_config
from oxrl.models.shared_prefix import SharingRefused
from oxrl.plan.preflight import Prepared, prepare_to_begin
from oxrl.recipes.session import Session
from oxrl.runs.clock import note_speed
from oxrl.runs.ranks import ALONE, Ranks, launched_world


def run_once(
    cfg: Config, *, resume: bool, accept: Sequence[str] = (), after: LostRankError | None = None
) -> None:
    """Go through the loop of a run once, from its beginning or from the newest checkpoint on.

    Args:
        resume, accept: as of `oxrl.commands.train.run`.
        after: ranks were lost, and the whole group starts again.
    """
    with training_ranks(cfg) as ranks:
        cfg = _with_day(cfg, ranks, resume=resume)
        with (
            closing(prepare_to_begin(cfg) if ranks.first else Prepared()) as prepared,
            session_of(cfg, ranks, resume=resume, accept=accept) as session,
        ):
            if ranks.agree(ranks.first and session.run.finished):
                session.message(f"{cfg.run.directory} is already complete; nothing to do")
                return
            if ranks.first:
                announce(cfg, session, resume=resume)
            if after is not None:
                session.message(
                    f"{after}\nStarting the whole group again from the newest checkpoint"
                )
            session.pool = prepared.pool
            begin(cfg, session)


def _with_day(cfg: Config, ranks: Ranks, *, resume: bool) -> Config:
    """The configuration with the day that its run began: chat templates may read the clock."""
    day = cfg.run.day
    if day is None and ranks.first:
        day = date.today().isoformat()
        if resume and (cfg.run.directory / "config.yaml").is_file():
            day = recorded_config(cfg.run.directory).get("run.day")
    run = cfg.run.model_copy(update={"day": ranks.agree(day)})
    return cfg.model_copy(update={"run": run})


def training_ranks(cfg: Config) -> AbstractContextManager[Ranks]:
    """This process's place among `run.training_gpus` ranks; joins the others that the launcher
    started.

    Raises:
        ConfigError: the launcher started another number of processes than the configuration says.
    """
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
    from oxrl.engines.train.joined_ranks import joined_ranks  # several processes

    return joined_ranks(Assembly(cfg).device, cfg.run.waits)


def session_of(cfg: Config, ranks: Ranks, *, resume: bool, accept: Sequence[str]) -> Session:
    """The session of a run; of the ranks but the first one that writes no file."""
    options = session_options(cfg, resume=resume, accept=accept)
    if ranks.first:
        return Session(options, ranks)
    from oxrl.recipes.follower import Follower  # one process has none

    return Follower(options, ranks)


def begin(cfg: Config, session: Session) -> None:
    """Settle what a configuration leaves open, and go through its loop.

    Where the weights turn out to be no good for prompts read once, the loop begins anew without.

    Args:
        session: of the run.
    """
    settled = settle(cfg, session)
    try:
        _note_and_train(settled, session)
    except SharingRefused as refusal:
        if settled.train.share_prefix == cfg.train.share_prefix:  # it was asked for
            raise
        _note_and_train(without_sharing(settled, session, refusal), session)


def _note_and_train(cfg: Config, session: Session) -> None:
    """Note in the run directory what a run is made with, and go through its loop."""
    assembly = Assembly(cfg, session.ranks, session.stopping, session.message)
    if assembly.images is not None:
        samples = cfg.rollout.from_samples if cfg.recipe == "rl" else None
        assembly.images.keep_in(cfg.run.directory, write=session.ranks.first, samples=samples)
    if session.ranks.first:
        if assembly.actions is not None:
            assembly.actions.write(cfg.run.directory)
        if assembly.speed is not None:
            note_speed(cfg.run.directory, assembly.speed)
    train(assembly, session)


def train(assembly: Assembly, session: Session) -> None:
    """Build what a run works with, and go through its loop; only that one is imported.

    Args:
        assembly: has the parts.
        session: of the run.
    """
    if assembly.cfg.recipe == "rl":
        from oxrl.assembly.assemble import train_rl  # others neither sample nor score

        train_rl(assembly, session)
    else:
        from oxrl.assembly.assemble_offline import train_offline  # reads rows of a file

        train_offline(assembly, session)
