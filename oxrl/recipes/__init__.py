"""Training loops, one per page. Only they and the CLI read the config."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oxrl.config import Config


def run(cfg: Config, *, resume: bool = False) -> None:
    """Run the recipe of `train.alg_name` in its run directory.

    Raises:
        OxrlError: anything a user can mend; `exit_code` says how the program should end.
    """
    from oxrl.recipes.build import training_ranks
    from oxrl.recipes.session import Follower, Session

    # Only the loop that runs is imported: the others bring libraries of their own.
    loop = import_module(f"oxrl.recipes.{cfg.train.row.recipe}").train
    with (
        training_ranks(cfg) as ranks,
        (Session if ranks.first else Follower)(cfg, resume=resume, ranks=ranks) as session,
    ):
        if ranks.agree(session.finished):
            session.message(f"{cfg.run.directory} is already complete; nothing to do")
            return
        loop(cfg, session)
