"""Training loops, one per page. Only they and the CLI read the config."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from oxrl.errors import LostRankError

if TYPE_CHECKING:
    from oxrl.config import Config


def run(cfg: Config, *, resume: bool = False) -> None:
    """Run the recipe of `train.alg_name` in its run directory.

    Raises:
        OxrlError: anything a user can mend; `exit_code` says how the program should end. Lost
            training ranks are among them only after `run.max_restarts` starts from the newest
            checkpoint.
    """
    lost: LostRankError | None = None
    for restarts_left in reversed(range(cfg.run.max_restarts + 1)):
        try:
            return _run(cfg, resume=resume or lost is not None, after=lost)
        except LostRankError as error:
            if not restarts_left:
                raise
            lost = error


def _run(cfg: Config, *, resume: bool, after: LostRankError | None) -> None:
    from oxrl.recipes.build import training_ranks
    from oxrl.recipes.follower import Follower
    from oxrl.recipes.inputs import with_pinned_data
    from oxrl.recipes.session import Session

    # Only the loop that runs is imported: the others bring libraries of their own.
    loop = import_module(f"oxrl.recipes.{cfg.train.row.recipe}").train
    with (
        training_ranks(cfg) as ranks,
        (Session if ranks.first else Follower)(cfg, resume=resume, ranks=ranks) as session,
    ):
        if ranks.agree(ranks.first and session.run.finished):
            session.message(f"{cfg.run.directory} is already complete; nothing to do")
            return
        if after is not None:
            session.message(f"{after}\nStarting the whole group again from the newest checkpoint")
        loop(with_pinned_data(cfg, cfg.run.directory, ranks), session)
