"""`oxrl train`: a run from its configuration to its end, begun again where ranks are lost.

What is checked here needs neither torch nor transformers, and comes before both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from oxrl.config import Config, check_config
from oxrl.config.schema import FIELDS
from oxrl.errors import ConfigError, LostRankError, did_you_mean
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.folder import hub_source, refuse_missing_folder
from oxrl.modelfiles.hub_status import check_on_hub
from oxrl.models.lazy_transformers import import_model_classes
from oxrl.runs.os_errors import explained
from oxrl.runs.pins import CODE


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
    check_accepted(accept, resume=resume)
    check_config(cfg)
    if not resume:  # one that goes on has its model noted, and says what has changed
        check_models_on_hub(cfg)
    import_model_classes()  # before anything below imports them
    from oxrl.commands.loop import run_once  # torch, which the checks above do without

    lost: LostRankError | None = None
    for restarts_left in reversed(range(cfg.run.max_restarts + 1)):
        try:
            with explained():
                if lost is None:
                    return run_once(cfg, resume=resume, accept=accept)
                try:
                    return run_once(cfg, resume=True, after=lost)
                except ConfigError as error:  # nothing is wrong with what has run before
                    raise LostRankError(f"{lost}; starting again: {error}") from error
        except LostRankError as error:
            if not restarts_left:
                raise
            lost = error


def check_models_on_hub(cfg: Config) -> None:
    """Make sure that models can be had that are not here, before what reads them is imported.

    Raises:
        DataError: one cannot.
    """
    if not is_builtin(cfg.model.name):
        refuse_missing_folder(cfg.model.name)
    source = hub_source(cfg.model.name, cfg.model.revision)
    if source is not None:
        check_on_hub(*source)


# Of one part of a reward, as reward.parts.correct.weight; and files that numbers of features name.
PART_FIELD = re.compile(r"reward\.parts\.[^.]+\.[a-z_]+|train\.features\.numbers")


def check_accepted(accept: Sequence[str], *, resume: bool) -> None:
    """Refuse changes that are no fields, and changes of a run that is not resumed.

    Raises:
        ConfigError: no such field, or nothing is resumed.
    """
    for name in accept:
        if name not in (*FIELDS, CODE) and not PART_FIELD.fullmatch(name):
            raise ConfigError(
                f"--accept-changes {name}: no such field; write section.field, such as train.lr"
                f"{did_you_mean(name, FIELDS)}"
            )
    if accept and not resume:
        raise ConfigError(
            f"--accept-changes {accept[0]} is for a run that goes on: add --resume, or leave it out"
        )
