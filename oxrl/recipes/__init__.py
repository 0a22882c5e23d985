"""Training loops, one per page. Only they and the CLI read the config."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from oxrl.errors import ConfigError, LostRankError, did_you_mean
from oxrl.runs.os_errors import explained

if TYPE_CHECKING:
    from oxrl.config import Config
    from oxrl.recipes.session import Session


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
    # Imported here: whoever imports a recipe alone needs no checks.
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


def loop_of(cfg: Config) -> str:
    """The module whose `train` runs a configuration."""
    if cfg.run.only is not None:
        return "oxrl.recipes.rollouts_only"
    return f"oxrl.recipes.{cfg.recipe}"


def check_models_on_hub(cfg: Config) -> None:
    """Whether models that are not here can be had, before the libraries that read them start.

    Raises:
        DataError: one cannot.
    """
    # Imported here: only names on the hub cost that.
    from oxrl.modelfiles.builtin import is_builtin
    from oxrl.modelfiles.files import hub_source, refuse_missing_folder
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
    from oxrl.assembly.assembly import build_actions, training_ranks
    from oxrl.assembly.micro_batch import with_micro_batches
    from oxrl.assembly.pins import with_pinned_inputs
    from oxrl.modelfiles.vision import vision_family
    from oxrl.plan.preflight import Prepared, prepare_to_begin
    from oxrl.recipes.session import Session

    # Only the loop that runs is imported: the others bring libraries of their own.
    loop = import_module(loop_of(cfg)).train
    with (
        training_ranks(cfg) as ranks,
        prepare_to_begin(cfg) if ranks.first else Prepared() as prepared,
        _session_class(Session, first=ranks.first)(
            cfg, resume=resume, accept=accept, ranks=ranks
        ) as session,
    ):
        if ranks.agree(ranks.first and session.run.finished):
            session.message(f"{cfg.run.directory} is already complete; nothing to do")
            return
        if after is not None:
            session.message(f"{after}\nStarting the whole group again from the newest checkpoint")
        session.pool = prepared.pool
        noted = session.run.noted if ranks.first else {}
        pinned = with_pinned_inputs(cfg, noted, ranks)
        pinned = with_micro_batches(pinned, session, ranks)
        if vision_family(cfg.model.name) is not None:
            from oxrl.assembly.images import keep_images

            keep_images(pinned, write=ranks.first)
        actions = build_actions(pinned)
        if actions is not None and ranks.first:
            actions.write(pinned.run.directory)
        _begin(loop, pinned, session, first=ranks.first)


def _session_class(of_first: type[Session], *, first: bool) -> type[Session]:
    if first:
        return of_first
    from oxrl.recipes.follower import Follower  # for the ranks that write no file

    return Follower


def _begin(
    loop: Callable[[Config, Session], None], cfg: Config, session: Session, *, first: bool
) -> None:
    """Run a loop; the first rank notes its machine and settles how prompts are read."""
    from oxrl.config.checks.share_prefix import open_choice

    if first and cfg.recipe == "rl":
        from oxrl.recipes.compute_accounting import note_machine

        note_machine(cfg)
    if first and open_choice(cfg):
        from oxrl.assembly.sharing import train_settled  # tries a model

        train_settled(loop, cfg, session)
        return
    loop(cfg, session)
