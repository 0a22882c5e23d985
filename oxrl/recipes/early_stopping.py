"""`run.stop_at`: a run ends after an evaluation that is as good as was asked for."""

from __future__ import annotations

from oxrl.config import Config
from oxrl.recipes.progress import Progress
from oxrl.recipes.session import Session


def note_score(
    cfg: Config, session: Session, progress: Progress, found: float | None, *, lower: bool = False
) -> None:
    """Look at what an evaluation found, and tell where it is good enough to end the run.

    Args:
        found: the score that decides; None where nothing was evaluated.
        lower: whether a lower one is the better one.
    """
    wanted = cfg.run.stop_at
    if wanted is None or found is None:
        return
    # A number that is none is not good enough.
    met = found <= wanted if lower else found >= wanted
    progress.good_enough = session.ranks.agree(met)
    if progress.good_enough:
        session.message(f"run.stop_at = {wanted:g} is reached: {found:.4g} at step {progress.step}")
