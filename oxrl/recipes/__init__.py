"""Training loops, one per page. Only they and the CLI read the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oxrl.config import Config


def run(cfg: Config, *, resume: bool = False) -> None:
    """Run the recipe of `train.alg_name` in its run directory.

    Raises:
        OxrlError: anything a user can mend; `exit_code` says how the program should end.
    """
    from oxrl.recipes import preference, reward_model, rl, supervised
    from oxrl.recipes.session import Session

    with Session(cfg, resume=resume) as session:
        if session.finished:
            session.message(f"{session.run.path} is already complete; nothing to do")
            return
        loops = {
            "rl": rl.train,
            "supervised": supervised.train,
            "preference": preference.train,
            "reward_model": reward_model.train,
        }
        loops[cfg.train.row.recipe](cfg, session)
